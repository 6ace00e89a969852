//! The catalog's laws against the tables that they were chosen from, by the path that everyone takes.
//! docs/results/predictor.md has the numbers that these tests print.

#![allow(clippy::print_stdout)]

use crate::published::{by_part, error, law_of};
use mixfleet_hal::DType;
use mixfleet_hal::catalog::{self, LawKind};
use mixfleet_hal::profile::{DeviceProfile, EvidenceBasis, Predictor};

/// Mean error that is allowed where a part has a law.
const LAW_MAX: f64 = 0.08;
/// For an L40S's products, whose measurements of equal work disagree by 11 %.
const L40S_GEMM_MAX: f64 = 0.12;
/// Tables that 40 points predict less well, and their tolerances. They are decode attention of kernels with
/// and without groups, over 12 pairs of head counts, each with steps of its own; and fp8 products, which
/// dispatch among more kernels than bf16 ones.
const BEYOND: [(&str, LawKind, DType, f64); 3] = [
    ("A100-SXM-80GB", LawKind::AttnDecode, DType::Bf16, 0.09),
    ("RTX-PRO-6000-SE", LawKind::AttnDecode, DType::Bf16, 0.081),
    ("H200-SXM-141GB", LawKind::Gemm, DType::F8E4m3, 0.09),
];

fn allowed(id: &str, kind: LawKind, dtype: DType) -> f64 {
    let beyond = BEYOND.iter().find(|(part, of, in_dtype, _)| (*part, *of, *in_dtype) == (id, kind, dtype));
    match beyond {
        Some((.., most)) => *most,
        None if (id, kind) == ("L40S", LawKind::Gemm) => L40S_GEMM_MAX,
        None => LAW_MAX,
    }
}

#[test]
fn the_default_path_predicts_every_table_of_a_part_with_laws() {
    let Some(parts) = by_part() else { return };
    let mut errors = Vec::new();
    for (id, tables) in parts {
        let part = catalog::part(id).expect("a part");
        let (default, claim) = (part.reached_profile().expect("laws"), Predictor::new(&part.profile()));
        let default = Predictor::new(&default);
        for table in &tables {
            let (kind, dtype) = (table.kind, table.dtype);
            let law = part.laws().iter().find(|law| (law.kind, law.dtype) == (kind, dtype)).expect("a law");
            let (off, claimed) = (error(&default, &table.points), error(&claim, &table.points));
            println!(
                "law {id} {} {}: {} rows, {} points, error {off:.4}, unseen {:.4}, datasheet {claimed:.4}",
                kind.name(),
                dtype.name(),
                table.points.len(),
                law.points.len(),
                law.error_unseen
            );
            assert_eq!(law.rows, table.points.len(), "{id}");
            if off > allowed(id, kind, dtype) {
                errors.push(format!("{id} {} {}: {off:.4}", kind.name(), dtype.name()));
            }
            if (off - law.error).abs() > 2e-3 {
                errors.push(format!("{id} {} says {:.4} and has {off:.4}", kind.name(), law.error));
            }
        }
    }
    assert!(errors.is_empty(), "{}", errors.join("\n"));
}

/// The smallest table, since a debug build is slow; `--example laws -- --check` does it for all.
#[test]
fn a_law_is_chosen_again_bit_for_bit() {
    let Some(parts) = by_part() else { return };
    let (id, tables) = parts.iter().find(|(id, _)| *id == "RTX-4090").expect("its profile");
    let part = catalog::part(id).expect("a part");
    let table = tables.iter().min_by_key(|table| table.points.len()).expect("tables");
    let law = part.laws().iter().find(|law| law.kind == table.kind).expect("a law");
    // as texts, since the errors are rounded there
    assert_eq!(law_of(part, table).to_string(), law.to_string());
}

#[test]
fn a_part_without_laws_borrows_those_of_its_relatives_and_says_so() {
    let a40 = catalog::part("A40").expect("a part").reached_profile().expect("relatives");
    assert!(catalog::is_claim(&a40) && !a40.points.is_empty());
    let of = |op: &str, dtype: DType| {
        a40.provenance.evidence.iter().find(|evidence| evidence.op == op && evidence.dtype == dtype)
    };
    let prefill = of("attn_prefill", DType::Bf16).expect("evidence");
    let from = ["A100-SXM-80GB", "L40S"].map(String::from).to_vec();
    assert_eq!(prefill.basis, EvidenceBasis::Borrowed { from });
    assert!(prefill.error.is_some());
    assert_eq!(of("gemm", DType::F8E4m3).expect("evidence").basis, EvidenceBasis::Datasheet);
    let l40s = catalog::part("L40S").expect("a part").reached_profile().expect("laws");
    assert!(l40s.provenance.evidence.iter().all(|evidence| evidence.basis == EvidenceBasis::Measured));
    assert!(catalog::part("MI300X").expect("a part").reached_profile().is_none());
}

/// The error to expect for a part without measured points: each part with laws is predicted from its nearest
/// relative.
#[test]
fn a_relatives_laws_are_nearer_than_the_datasheet() {
    let Some(parts) = by_part() else { return };
    let pairs = [
        ("H100-SXM-80GB", "H200-SXM-141GB"),
        ("H200-SXM-141GB", "H100-SXM-80GB"),
        ("L40S", "RTX-PRO-6000-SE"),
        ("RTX-PRO-6000-SE", "L40S"),
        ("A100-SXM-80GB", "L40S"),
    ];
    for (id, relative) in pairs {
        let [part, relative] = [id, relative].map(|id| catalog::part(id).expect("a part"));
        let points = relative.laws().iter().flat_map(|law| law.points.clone()).collect();
        let lender = Predictor::new(&DeviceProfile { points, ..relative.profile() });
        let borrowed = Predictor::borrowing(&part.profile(), &[lender]);
        let claim = Predictor::new(&part.profile());
        for table in &parts.iter().find(|(known, _)| *known == id).expect("tables").1 {
            let (off, claimed) = (error(&borrowed, &table.points), error(&claim, &table.points));
            let (kind, dtype) = (table.kind.name(), table.dtype.name());
            println!("borrowed {id} from {} {kind} {dtype}: {off:.4}, datasheet {claimed:.4}", relative.id);
            assert!(off < claimed, "{id} {kind} {dtype}: {off:.4}");
        }
    }
}
