use super::super::super::made::{MadeMatrix, MadePart, SourceTensor};
use super::super::kinds::GgmlKind as Kind;
use super::*;
use mixfleet_hal::{HostMemory, MatrixKind};
use std::sync::Arc;

/// Columns of the row, and columns with restated weights.
const COLUMNS: usize = 256;
const AT: [usize; 6] = [0, 1, 37, 100, 130, 255];

/// Per type: offset of f16 numbers in a block, weights of a row at [`AT`], and the sum of all weights times 1
/// to 7 in turn, which the `gguf` package 0.19 gives for the bytes of [`row`].
#[rustfmt::skip]
const EXPECTED: [(Kind, &[usize], [f64; 6], f64); 23] = [
    (Kind::Q4_0, &[0], [0.199951171875, 0.39990234375, 0.10003662109375, -0.6009521484375, -0.1002197265625, 0.70281982421875], -45.57806396484375),
    (Kind::Q4_1, &[0, 2], [1.15850830078125, 0.95855712890625, 1.259246826171875, 0.559661865234375, 0.15911865234375, 1.464630126953125], 738.77099609375),
    (Kind::Q5_0, &[0], [-0.999755859375, 0.0, -0.50018310546875, 0.70111083984375, 1.5032958984375, 1.50604248046875], 19.861083984375),
    (Kind::Q5_1, &[0, 2], [0.05877685546875, 0.65863037109375, 1.459320068359375, 0.359344482421875, 0.35955810546875, 3.071075439453125], 1570.3617553710938),
    (Kind::Q8_0, &[0], [-11.797119140625, 4.39892578125, -5.4019775390625, 7.4117431640625, 0.9019775390625, 0.90362548828125], 244.40826416015625),
    (Kind::Q2K, &[80, 82], [0.0, 0.0, 3.328857421875, 0.929443359375, 0.22357177734375, 0.876708984375], 1353.8688354492188),
    (Kind::Q3K, &[108], [-4.4989013671875, -1.4996337890625, -8.0980224609375, -4.4989013671875, -7.998046875, -8.997802734375], 402.901611328125),
    (Kind::Q4K, &[0, 2], [4.41815185546875, 11.61639404296875, 25.48223876953125, 11.45159912109375, 8.41607666015625, 2.076416015625], 16319.676818847656),
    (Kind::Q5K, &[0, 2], [10.41668701171875, 17.61492919921875, 63.27301025390625, 101.02972412109375, 14.91448974609375, 3.676025390625], 31967.35565185547),
    (Kind::Q6K, &[208], [313.5234375, -58.78564453125, 111.57275390625, -45.5888671875, -78.380859375, -2.999267578125], -848.4927978515625),
    (Kind::Iq1S, &[0], [0.0874786376953125, 0.7873077392578125, 0.4373931884765625, 0.7873077392578125, 0.7873077392578125, 1.4621429443359375], 20.619964599609375),
    (Kind::Iq1M, &[], [0.1874542236328125, -1.3121795654296875, 1.1372222900390625, -0.1374664306640625, 0.7873077392578125, 0.6123504638671875], -29.017913818359375),
    (Kind::Iq2Xxs, &[0], [0.8997802734375, -0.8997802734375, 9.060287475585938, -2.0994873046875, 7.8105926513671875, -1.5621185302734375], -255.98748779296875),
    (Kind::Iq2Xs, &[0], [0.5373687744140625, -0.0999755859375, 1.2996826171875, -0.5373687744140625, 7.8105926513671875, -0.8997802734375], 149.2510528564453),
    (Kind::Iq2S, &[0], [-0.9372711181640625, -0.9372711181640625, 1.4996337890625, -0.2999267578125, 2.6993408203125, 3.0992431640625], -180.78085327148438),
    (Kind::Iq3Xxs, &[0], [9.0977783203125, 2.0994873046875, 13.94659423828125, -48.03826904296875, -7.4981689453125, 2.2994384765625], 100.62542724609375),
    (Kind::Iq3S, &[0], [-4.4989013671875, 9.8975830078125, 6.4984130859375, -2.0994873046875, -2.0994873046875, -1.8995361328125], 165.759521484375),
    (Kind::Iq4Nl, &[0], [2.4993896484375, 5.2987060546875, 1.30047607421875, -8.31317138671875, -1.002197265625, 11.34552001953125], -548.1968383789062),
    (Kind::Iq4Xs, &[0], [-124.76953125, -11.9970703125, 0.0, -16.595947265625, 270.333984375, 194.952392578125], 5147.94287109375),
    (Kind::Tq1_0, &[52], [-0.0999755859375, -0.0999755859375, 0.0, -0.0999755859375, 0.0, 0.0999755859375], -6.998291015625),
    (Kind::Tq2_0, &[64], [-0.0999755859375, 0.0999755859375, 0.0999755859375, -0.0999755859375, 0.199951171875, 0.199951171875], 49.387939453125),
    (Kind::Mxfp4, &[], [0.03125, -0.0078125, 0.015625, 0.25, -0.125, 1.5], 19.71484375),
    (Kind::Nvfp4, &[], [-0.0, -0.0, -0.009765625, 0.021484375, -4.125, -2.625], -40.255859375),
];

/// A row of blocks with bytes computed from their positions, and finite f16 numbers.
fn row(kind: Kind, halves: &[usize]) -> Vec<u8> {
    let byte = |i: usize| (((i * i * 31 + i * 7 + (i >> 3) * 57) ^ (i >> 5)) & 255) as u8;
    let blocks = COLUMNS / kind.columns() as usize;
    let mut row: Vec<u8> = (0..blocks * kind.bytes()).map(byte).collect();
    for (k, block) in row.chunks_mut(kind.bytes()).enumerate() {
        for (j, at) in halves.iter().enumerate() {
            block[*at] = (0x66 - j * 0x20 + k) as u8;
            block[at + 1] = if j == 0 { 0x2E } else { 0xA9 };
        }
        match kind {
            Kind::Iq1M => {
                for (word, nibble) in [6, 6, 0xE, 2].into_iter().enumerate() {
                    block[49 + 2 * word] = block[49 + 2 * word] & 15 | nibble << 4;
                }
            }
            Kind::Mxfp4 => block[0] = (0x78 + k) as u8,
            Kind::Nvfp4 => block[..4].iter_mut().for_each(|scale| *scale &= 0x3F),
            _ => {}
        }
    }
    row
}

/// The weights of rows of blocks.
fn weights(kind: Kind, bytes: Vec<u8>, rows: usize) -> Vec<f64> {
    let quantised = kind.quantised().expect("a quantised type");
    let source = SourceTensor { shard: 0, range: 0..bytes.len() };
    let parts = quantised.parts(1, rows as u32, COLUMNS as u32).into_iter().map(|array| {
        let part = match array.name {
            "high" => BlockPart::High,
            "scales" => BlockPart::Scales,
            "zeros" => BlockPart::Zeros,
            "supers" => BlockPart::Supers,
            "outer" => return MadePart::made(&source, |_| 1f32.to_le_bytes().to_vec()),
            _ => BlockPart::Codes,
        };
        MadePart::made(&source, move |bytes| rows_of(kind, bytes, (rows, COLUMNS), part, |row| row))
    });
    let size = (rows as u32, COLUMNS as u32);
    let matrix = MadeMatrix::new(MatrixKind::Quantised(quantised), size, parts.collect()).expect("a matrix");
    let shards: Vec<Arc<dyn HostMemory>> = vec![Arc::new(bytes)];
    matrix.values(&shards).expect("weights")
}

#[test]
fn weights_of_every_type_are_those_of_the_gguf_package() {
    for (kind, halves, expected, sum) in EXPECTED {
        let found = weights(kind, row(kind, halves), 1);
        let some: Vec<f64> = AT.iter().map(|at| f64::from(found[*at] as f32)).collect();
        assert_eq!(some, expected, "{}", kind.name());
        let all = found.iter().enumerate();
        let total: f64 = all.map(|(at, weight)| f64::from(*weight as f32) * (at % 7 + 1) as f64).sum();
        assert!((total - sum).abs() <= 1e-9 * sum.abs(), "{}: {total}, expected {sum}", kind.name());
    }
}

#[test]
fn rows_are_put_into_another_order() {
    for (kind, halves, ..) in EXPECTED {
        let first = row(kind, halves);
        let mut second = first.clone();
        second.reverse();
        let both = [first, second].concat();
        let turned = |part| rows_of(kind, &both, (2, COLUMNS), part, |row| 1 - row);
        let straight = |part| rows_of(kind, &both, (2, COLUMNS), part, |row| row);
        for part in [BlockPart::Codes, BlockPart::Scales] {
            let (turned, straight) = (turned(part), straight(part));
            let half = straight.len() / 2;
            assert_eq!(turned, [&straight[half..], &straight[..half]].concat(), "{}", kind.name());
        }
    }
}
