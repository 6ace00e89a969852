use super::*;

fn of(code: CodeKind, scale: ScaleKind, zero: ZeroKind) -> Quantised {
    Quantised { code, group_rows: 1, group_columns: 32, scale, zero, outer: false }
}

#[test]
fn formats_take_the_bits_that_they_are_known_for() {
    let bits = |quantised: Quantised, columns: u32| {
        8.0 * quantised.bytes(1, 128, columns) as f64 / (128.0 * f64::from(columns))
    };
    let q4_0 = of(CodeKind::U4, ScaleKind::F16, ZeroKind::Middle);
    let q8_0 = of(CodeKind::I8, ScaleKind::F16, ZeroKind::Middle);
    assert_eq!((bits(q4_0, 256), bits(q8_0, 256)), (4.5, 8.5));
    // GGUF packs eight scales and minima into 12 bytes, this one into 16
    assert_eq!(bits(of(CodeKind::U4, ScaleKind::I8, ZeroKind::Minima), 512), 4.625);
    assert_eq!(bits(of(CodeKind::U5, ScaleKind::I8, ZeroKind::Minima), 512), 5.625);
    let q6_k = Quantised { group_columns: 16, ..of(CodeKind::U6, ScaleKind::I8, ZeroKind::Middle) };
    assert_eq!(bits(q6_k, 512), 6.5625);
    assert_eq!(bits(Quantised::MXFP4, 512), 4.5);
    let outer = 32.0 / (128.0 * 512.0);
    assert_eq!(bits(Quantised::NVFP4, 512), 4.5 + outer);
}

#[test]
fn there_are_as_many_parts_as_are_counted() {
    for code in CodeKind::ALL {
        for scale in ScaleKind::ALL {
            for zero in [ZeroKind::Middle, ZeroKind::Points, ZeroKind::Minima] {
                for outer in [false, true] {
                    let kind = Quantised { outer, ..of(code, scale, zero) };
                    assert_eq!(kind.parts(3, 5, 256).len(), kind.part_count(), "{kind}");
                    let json = serde_json::to_value(MatrixKind::Quantised(kind)).unwrap();
                    let back: MatrixKind = serde_json::from_value(json).unwrap();
                    assert_eq!(back, MatrixKind::Quantised(kind));
                }
            }
        }
    }
    assert_eq!(serde_json::to_value(MatrixKind::Plain(DType::Bf16)).unwrap(), serde_json::json!("bf16"));
}

#[test]
fn blocks_at_the_edges_are_partial() {
    let fp8 =
        Quantised { group_rows: 2, group_columns: 8, ..of(CodeKind::E4m3, ScaleKind::F32, ZeroKind::Middle) };
    // two matrices of 3 x 12, all codes 1.0 (0x38), scales 1 to 8
    let (codes, scales) = (vec![f64::from(0x3838_3838u32); 18], (1..=8).map(f64::from).collect::<Vec<_>>());
    let parts = fp8.parts(2, 3, 12);
    assert!(parts.iter().map(QuantisedPart::elements).eq([18, 8]));
    let values: Vec<f64> = fp8.decode(&[&codes, &scales], 2, 3, 12).into_iter().map(|(v, _)| v).collect();
    let row = |a: f64, b: f64| [[a; 8].as_slice(), &[b; 4]].concat();
    let rows = [(1.0, 2.0), (1.0, 2.0), (3.0, 4.0), (5.0, 6.0), (5.0, 6.0), (7.0, 8.0)];
    assert_eq!(values, rows.map(|(a, b)| row(a, b)).concat());
}

#[test]
fn planes_scales_and_minima_are_put_together() {
    // the K format of 5 bits: code 1 + 16 in the first column, 15 in the second
    let kind = of(CodeKind::U5, ScaleKind::I8, ZeroKind::Minima);
    let mut codes = vec![0.0; 32];
    (codes[0], codes[31]) = (f64::from(0xF1u32), f64::from(0x7000_0000u32));
    let mut high = vec![0.0; 8];
    (high[0], high[7]) = (1.0, f64::from(1u32 << 31));
    let scales = [f64::from(0x0000_0003u32), f64::from(0xFE00_0000u32)];
    let zeros = [f64::from(0x0000_0005u32), 0.0];
    let supers = [0.5, 0.25];
    let values = kind.decode(&[&codes, &high, &scales, &zeros, &supers], 1, 1, 256);
    let at = |column: usize| values[column].0;
    assert_eq!(at(0), 17.0 * 3.0 * 0.5 - 5.0 * 0.25);
    assert_eq!(at(1), 15.0 * 3.0 * 0.5 - 5.0 * 0.25);
    assert_eq!(at(2), -1.25);
    assert_eq!(at(255), -2.0 * 0.5 * 23.0);
    assert_eq!(values[1].1, 15.0 * 3.0 * 0.5 + 5.0 * 0.25);
}

#[test]
fn zero_points_and_floats_of_four_bits() {
    let kind = Quantised { group_columns: 8, ..of(CodeKind::U4, ScaleKind::Bf16, ZeroKind::Points) };
    let values = kind.decode(&[&[f64::from(0xF000_0020u32)], &[0.5], &[3.0]], 1, 1, 8);
    assert_eq!((values[0].0, values[1].0, values[7].0), (-1.5, -0.5, 6.0));
    let nvfp4 = Quantised { group_columns: 8, ..Quantised::NVFP4 };
    let values = nvfp4.decode(&[&[f64::from(0xF000_0071u32)], &[2.0], &[0.25]], 1, 1, 8);
    assert_eq!((values[0].0, values[1].0, values[7].0), (0.25, 3.0, -3.0));
    assert_eq!(nvfp4.format(), WeightFormat::Nvfp4);
}

#[test]
fn what_cannot_be_stored_is_refused_in_words() {
    let u4 = of(CodeKind::U4, ScaleKind::F32, ZeroKind::Points);
    assert_eq!(u4.check(64), Ok(()));
    assert!(u4.check(63).unwrap_err().contains("63 columns of u4"));
    assert!(of(CodeKind::U5, ScaleKind::F16, ZeroKind::Middle).check(48).is_err());
    assert!(of(CodeKind::E2m1, ScaleKind::F16, ZeroKind::Points).check(64).is_err());
    let k = of(CodeKind::U4, ScaleKind::I8, ZeroKind::Minima);
    assert_eq!((k.check(512), k.check(128).is_err()), (Ok(()), true));
    assert!(Quantised { group_columns: 128, ..k }.check(512).is_err());
    assert!(Quantised { group_rows: 0, ..u4 }.check(64).is_err());
}
