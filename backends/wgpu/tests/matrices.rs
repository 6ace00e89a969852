//! Products by the matrices that an adapter's subgroups multiply. Mesa's lavapipe has them from version 26
//! on: `hwtests/matrices.sh` runs these tests on one.

use mixfleet_hal::{Backend, BufferUsage, Cmd, DType, Device, GroupedRows, MatrixKind, OpSig};
use mixfleet_hwtests::cases::{Case, TokenSpread};
use mixfleet_hwtests::{CheckOutcome, SuiteEntry, attempt};
use mixfleet_wgpu::{AdapterOverrides, WgpuBackend, WgpuDevice};
use std::time::Duration;

/// Opens the first adapter if it multiplies matrices. With `MIXFLEET_MATRICES` in the environment, it must.
fn opened(tuning: AdapterOverrides) -> Option<WgpuDevice> {
    let must = std::env::var_os("MIXFLEET_MATRICES").is_some();
    if let Err(absent) = WgpuBackend.probe() {
        assert!(!must, "no wgpu device: {absent}");
        eprintln!("SKIPPED: no wgpu device: {absent}");
        return None;
    }
    let device = WgpuDevice::open(0, tuning).unwrap();
    let unit = device.info().notes.iter().find(|(name, _)| name == "matrices").cloned();
    eprintln!("{}: {unit:?}", device.info().name);
    if unit.is_none() {
        assert!(!must, "{} multiplies no matrices", device.info().name);
        eprintln!("SKIPPED: {} multiplies no matrices of f16; see hwtests/matrices.sh", device.info().name);
        return None;
    }
    Some(device)
}

/// Holds each case against the oracle.
fn conform(device: &WgpuDevice, cases: impl IntoIterator<Item = (OpSig, TokenSpread)>) {
    let (mut tried, mut ratio_max) = (0, 0.0f64);
    for (sig, spread) in cases {
        let case = Case { sig, spread, seed: 7 + tried };
        let report =
            attempt(device, &SuiteEntry { name: sig.name(), case: Some(case) }, Duration::from_secs(600));
        assert_eq!(report.outcome, CheckOutcome::Pass, "{sig:?}");
        ratio_max = ratio_max.max(report.ratio_max.unwrap());
        tried += 1;
    }
    assert!(tried > 0);
    eprintln!("{tried} cases, the largest error {ratio_max:.3} of its bound");
}

fn product((m, n, k): (u32, u32, u32), out: DType, bias: bool, accumulate: bool) -> OpSig {
    OpSig::Gemm { m, n, k, x: DType::F16, weight: DType::F16, out, bias, accumulate }
}

/// Products whose rows, columns and lengths lie around the edges of matrices (8, 16) and of tiles (64 rows
/// and columns, 16 along k), and longer ones.
fn products() -> impl Iterator<Item = (OpSig, TokenSpread)> {
    let rows = [17, 24, 63, 64, 65, 130].map(|m| (m, 40, 48));
    let columns = [1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 129].map(|n| (33, n, 40));
    let lengths = [1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 65, 1000, 4096].map(|k| (19, 34, k));
    let shapes = rows.into_iter().chain(columns).chain(lengths).chain([(200, 130, 515), (128, 192, 256)]);
    let plain = shapes.map(|shape| product(shape, DType::F32, false, false));
    let outs = [DType::F16, DType::Bf16, DType::F32].into_iter();
    let ends = outs.flat_map(|out| {
        let flags = [(false, false), (true, false), (false, true), (true, true)];
        let shapes = flags.map(|flags| [((70, 67, 72), flags), ((20, 66, 41), flags)]);
        shapes.into_iter().flatten().map(move |(shape, (bias, add))| product(shape, out, bias, add))
    });
    plain.chain(ends).map(|sig| (sig, TokenSpread::Even))
}

#[test]
fn products_by_matrices_conform() {
    let Some(device) = opened(AdapterOverrides::default()) else { return };
    conform(&device, products());
}

#[test]
fn products_by_matrices_of_cut_weights_conform() {
    let cut = AdapterOverrides { binding_bytes_max: Some(32 << 10), ..AdapterOverrides::default() };
    let Some(device) = opened(cut) else { return };
    conform(
        &device,
        [product((200, 130, 515), DType::F32, true, true), product((70, 67, 72), DType::F16, true, true)]
            .map(|sig| (sig, TokenSpread::Even)),
    );
}

#[test]
fn products_of_experts_by_matrices_conform() {
    let Some(device) = opened(AdapterOverrides::default()) else { return };
    let of = |rows: &[u32], (n, k), out, bias| {
        let (choices, experts) = (rows.iter().sum(), u32::try_from(rows.len()).unwrap());
        let touched = u32::try_from(rows.iter().filter(|&&rows| rows > 0).count()).unwrap();
        let grouped = GroupedRows { choices, fan: 1, experts, touched, others: 0 };
        let weight = MatrixKind::Plain(DType::F16);
        let sig = OpSig::GroupedGemm { grouped, n, k, x: DType::F16, weight, out, bias };
        (sig, TokenSpread::Experts(rows.to_vec()))
    };
    conform(
        &device,
        [
            of(&[33, 65, 0, 67], (40, 48), DType::F32, false),
            of(&[64, 1, 130], (67, 40), DType::F32, true),
            of(&[20, 70], (66, 71), DType::F16, true),
            of(&[128], (64, 256), DType::Bf16, false),
        ],
    );
}

#[test]
fn what_is_below_the_least_normal_of_f16_counts() {
    let Some(device) = opened(AdapterOverrides::default()) else { return };
    let (m, n, k) = (32u32, 16u32, 16u32);
    let sig = product((m, n, k), DType::F32, false, false);
    // 2^-24 and 2^10: each product is 2^-14, and so are all sums exact
    let (least, large) = (1u16.to_le_bytes(), 0x6400u16.to_le_bytes());
    let slice = |bytes: &[u8]| {
        let slice = device.alloc(bytes.len() as u64, BufferUsage::Activations).unwrap();
        device.write(&slice, bytes).unwrap();
        slice
    };
    let args = [
        slice(&least.repeat((m * k) as usize)),
        slice(&large.repeat((n * k) as usize)),
        slice(&vec![0; (m * n * 4) as usize]),
    ];
    let mut queue = device.queue().unwrap();
    let ticket = queue.submit(&[Cmd::new(sig, &args).unwrap()]).unwrap();
    queue.wait(ticket, Duration::from_secs(600)).unwrap();
    let mut out = vec![0; (m * n * 4) as usize];
    device.read(&args[2], &mut out).unwrap();
    let got: Vec<f32> =
        out.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect();
    assert_eq!(got, vec![f32::powi(2.0, -10); got.len()]);
}
