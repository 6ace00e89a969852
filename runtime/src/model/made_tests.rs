use super::*;
use mixfleet_hal::{CodeKind, DType, ZeroKind};

fn matrix(kind: Quantised, rows: u32, columns: u32) -> (MadeMatrix, Vec<Arc<dyn HostMemory>>) {
    let mut bytes = Vec::new();
    let mut parts = Vec::new();
    for part in kind.parts(1, rows, columns) {
        let start = bytes.len();
        for i in 0..part.elements() {
            match part.dtype {
                DType::U32 => {
                    bytes.extend(((i as u32).wrapping_mul(0x0123_4567) & 0xF7F7_F7F7).to_le_bytes())
                }
                dtype => dtype.encode(((i % 13) as f64 - 5.0) / 8.0, &mut bytes),
            }
        }
        parts.push(MadePart::InPlace(SourceTensor { shard: 0, range: start..bytes.len() }));
    }
    let shards: Vec<Arc<dyn HostMemory>> = vec![Arc::new(bytes)];
    (MadeMatrix::new(MatrixKind::Quantised(kind), (rows, columns), parts).unwrap(), shards)
}

/// The weights of a part by the description of the part.
fn values_of(matrix: &MadeMatrix, shards: &[Arc<dyn HostMemory>], cut: &Cut) -> Result<Vec<f64>, String> {
    let part = matrix.cut(cut)?;
    let kind = part.kind.quantised().unwrap();
    let arrays: Vec<Vec<f64>> = (0..matrix.parts.len())
        .map(|at| {
            let described = matrix.described()[at];
            let array = matrix.array(at, shards).unwrap();
            let bytes = part.cuts[at].of(&array, described.rows as usize);
            described.dtype.decode(&bytes)
        })
        .collect();
    for (array, kind) in arrays.iter().zip(kind.parts(1, part.rows, part.columns)) {
        assert_eq!(array.len() as u64, kind.elements(), "{}", kind.name);
    }
    let arrays: Vec<&[f64]> = arrays.iter().map(|array| array.as_slice()).collect();
    Ok(kind.decode(&arrays, 1, part.rows, part.columns).into_iter().map(|(value, _)| value).collect())
}

#[test]
fn a_part_has_the_weights_of_the_whole() {
    let of = |code, group_rows, group_columns, scale, zero| Quantised {
        code,
        group_rows,
        group_columns,
        scale,
        zero,
        outer: false,
    };
    let kinds = [
        of(CodeKind::U4, 1, 32, ScaleKind::Bf16, ZeroKind::Points),
        of(CodeKind::U4, 1, 32, ScaleKind::I8, ZeroKind::Minima),
        of(CodeKind::U6, 1, 16, ScaleKind::I8, ZeroKind::Middle),
        of(CodeKind::E4m3, 24, 80, ScaleKind::F32, ZeroKind::Middle),
        of(CodeKind::E4m3, 64, 512, ScaleKind::F32, ZeroKind::Middle),
        of(CodeKind::I8, 1, 4096, ScaleKind::F16, ZeroKind::Middle),
        Quantised::NVFP4,
    ];
    for kind in kinds {
        let (rows, columns) = (40, 512);
        let (matrix, shards) = matrix(kind, rows, columns);
        let all = matrix.values(&shards).unwrap();
        assert!(values_of(&matrix, &shards, &Cut::Whole).unwrap() == all, "{kind}");
        for range in [0..40, 0..16, 16..40, 7..9, 25..26] {
            let part = values_of(&matrix, &shards, &Cut::Rows(range.clone())).unwrap();
            let same = &all[range.start as usize * 512..range.end as usize * 512];
            assert!(part.iter().zip(same).all(|(a, b)| a.to_bits() == b.to_bits()), "{kind} rows {range:?}");
        }
        for range in [0..256, 256..512, 64..320, 32..512] {
            let cut = Cut::Columns(range.clone());
            let part = match values_of(&matrix, &shards, &cut) {
                Err(problem) => {
                    assert!(kind.scale == ScaleKind::I8 && problem.contains("256"), "{kind}: {problem}");
                    continue;
                }
                Ok(part) => part,
            };
            let rows = all.chunks(512).flat_map(|row| &row[range.start as usize..range.end as usize]);
            assert!(
                part.iter().zip(rows).all(|(a, b)| a.to_bits() == b.to_bits()),
                "{kind} columns {range:?}"
            );
        }
    }
}

#[test]
fn arrays_of_other_sizes_are_refused() {
    let source = SourceTensor { shard: 0, range: 0..64 };
    let parts = |codes: MadePart| vec![codes, MadePart::InPlace(SourceTensor { shard: 0, range: 64..72 })];
    let kind = MatrixKind::Quantised(Quantised::MXFP4);
    let of = |parts| MadeMatrix::new(kind, (4, 32), parts);
    assert!(of(parts(MadePart::InPlace(source.clone()))).is_ok());
    let short = SourceTensor { shard: 0, range: 0..60 };
    assert!(of(parts(MadePart::InPlace(short))).unwrap_err().contains("60 bytes of codes, expected 64"));
    let shards: Vec<Arc<dyn HostMemory>> = vec![Arc::new(vec![0u8; 72])];
    let made = of(parts(MadePart::made(&source, |bytes| bytes[..8].to_vec()))).unwrap();
    assert!(made.array(0, &shards).unwrap_err().contains("codes have 8 bytes"));
    assert_eq!(made.values(&shards), None);
    assert!(MadeMatrix::new(kind, (4, 31), Vec::new()).is_err());
}
