//! The time of a matrix product whose weights are quantised.
//!
//! A device that multiplies in the format runs it at that rate; any other converts the weights as it reads
//! them and multiplies in the dtype of the activations. Kernel times of most formats are unknown, so the
//! efficiency is that of a plain product with as many bytes of weights: `time = T(plain, n bits / bits of the
//! plain dtype) * roofline / roofline of the plain one`, with lower shares of the rates for external engines'
//! products in 4 bits. Products in fp8 are predicted as such, since there are tables of them.

use mixfleet_hal::cast::to_u32;
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::units::{Bytes, Flop, FlopPerSecond, Seconds};
use mixfleet_hal::{DType, OpSig, WeightFormat};

/// The kernels of products in formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoredKernels {
    /// As efficient as plain ones of as many bytes.
    AsPlain,
    /// Those of external engines, in a dense model.
    OfDense,
    /// The same in a mixture of experts.
    OfMixture,
}

/// Share of a plain product's rates that a product of 4-bit weights reaches where it converts them while
/// reading: chosen on published runs of mixtures in int4 and mxfp4 (docs/results/truth.md).
const CONVERTED: f64 = 0.8;
/// The same of bandwidth and of arithmetic where the device multiplies in 4 bits: nvfp4 against bf16 on the
/// GB200 (`roofline-efficiency.csv`: 0.67 of 0.87, 0.54 of 0.80).
const MULTIPLIED: [f64; 2] = [0.77, 0.68];
/// Time to quantise its rows to 4 bits: that of the shortest kernel in published tables.
const QUANTISE_ROWS: Seconds = Seconds(6e-6);

/// The time of `sig` with its weights in `format`, by `time`, which predicts plain operations on `profile`.
pub(super) fn stored_time(
    profile: &DeviceProfile,
    format: Option<WeightFormat>,
    sig: &OpSig,
    kernels: StoredKernels,
    time: impl Fn(&OpSig) -> Seconds,
) -> Seconds {
    // products by experts were measured in plain dtypes at most
    let plain = if format.is_some() { sig.equivalent().unwrap_or(*sig) } else { *sig };
    let (Some(format), OpSig::Gemm { m, n, k, x, weight, out, bias, accumulate }) = (format, plain) else {
        return time(sig);
    };
    let sig = &plain;
    let rate = |dtype| profile.compute.iter().find(|(known, _)| *known == dtype).map(|(_, rate)| *rate);
    if format == WeightFormat::Fp8 && rate(DType::F8E4m3).is_some() {
        let eight = DType::F8E4m3;
        return time(&OpSig::Gemm { m, n, k, x: eight, weight: eight, out, bias, accumulate });
    }
    let share = format.bits() / (8 * weight.size_bytes()) as f64;
    let columns = to_u32((f64::from(n) * share).round()).max(1);
    let plain = OpSig::Gemm { m, n: columns, k, x, weight, out, bias, accumulate };
    let saved = f64::from(n) * f64::from(k) * weight.size_bytes() as f64 * (1.0 - share);
    // some parts multiply integers more slowly than they do bf16
    let own = profile.formats.iter().filter(|(known, _)| *known == format).map(|(_, rate)| rate.0);
    let own = own.reduce(f64::max);
    let arithmetic =
        own.into_iter().chain(rate(x).map(|rate| rate.0)).reduce(f64::max).unwrap_or(f64::INFINITY);
    let is_four = format.bits() < 8.0 && kernels != StoredKernels::AsPlain;
    let ([stream, compute], quantising) = match (is_four, own, kernels) {
        (true, None, _) => ([CONVERTED; 2], Seconds::ZERO),
        (true, Some(_), StoredKernels::OfDense) => (MULTIPLIED, QUANTISE_ROWS),
        _ => ([1.0; 2], Seconds::ZERO),
    };
    let computing = Flop(sig.flops()) / FlopPerSecond(arithmetic * compute);
    let roofline = computing.max(Bytes((sig.bytes() - saved).max(0.0) / stream) / profile.bandwidth);
    time(&plain) * (roofline / profile.roofline(&plain)) + quantising
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::catalog::part;

    fn gemm(m: u32) -> OpSig {
        let x = DType::Bf16;
        OpSig::Gemm { m, n: 8192, k: 8192, x, weight: x, out: x, bias: false, accumulate: false }
    }

    /// Time in the format over time in bf16.
    fn ratio(id: &str, format: WeightFormat, rows: u32) -> f64 {
        let profile = part(id).unwrap().profile();
        let time = |sig: &OpSig| profile.time(sig);
        stored_time(&profile, Some(format), &gemm(rows), StoredKernels::AsPlain, time) / time(&gemm(rows))
    }

    fn near(got: f64, wanted: f64) {
        assert!((got / wanted - 1.0).abs() < 0.01, "{got} against {wanted}");
    }

    #[test]
    fn few_rows_take_the_time_of_the_bytes_and_many_that_of_the_arithmetic() {
        for (id, format) in [
            ("H100-SXM-80GB", WeightFormat::Fp8),
            ("A100-SXM-80GB", WeightFormat::Fp8),
            ("H100-SXM-80GB", WeightFormat::Int4),
            ("B200-SXM", WeightFormat::Nvfp4),
            ("MI355X", WeightFormat::Mxfp4),
        ] {
            near(ratio(id, format, 1), format.bits() / 16.0);
        }
        // no units for it: converted, and multiplied in bf16
        near(ratio("A100-SXM-80GB", WeightFormat::Fp8, 8192), 1.0);
        near(ratio("H100-SXM-80GB", WeightFormat::Int4, 8192), 1.0);
        near(ratio("H100-SXM-80GB", WeightFormat::Mxfp4, 8192), 1.0);
        near(ratio("MI355X", WeightFormat::Nvfp4, 8192), 1.0);
        // units for it
        near(ratio("H100-SXM-80GB", WeightFormat::Fp8, 8192), 989.0 / 1979.0);
        near(ratio("A100-SXM-80GB", WeightFormat::Int8, 8192), 0.5);
        near(ratio("B200-SXM", WeightFormat::Nvfp4, 8192), 0.25);
        near(ratio("MI355X", WeightFormat::Mxfp4, 8192), 2517.0 / 10_066.0);
        // slower units for it than for bf16
        near(ratio("B300-SXM", WeightFormat::Int8, 8192), 1.0);
    }

    #[test]
    fn kernels_reach_as_much_as_plain_ones_of_as_many_bytes() {
        let profile = part("L40S").unwrap().reached_profile().unwrap();
        let time = |sig: &OpSig| profile.time(sig);
        let int4 = stored_time(&profile, Some(WeightFormat::Int4), &gemm(1), StoredKernels::AsPlain, time);
        let OpSig::Gemm { m, n, k, x, weight, out, bias, accumulate } = gemm(1) else { panic!("a product") };
        let n = (f64::from(n) * WeightFormat::Int4.bits() / 16.0).round() as u32;
        near(int4 / time(&OpSig::Gemm { m, n, k, x, weight, out, bias, accumulate }), 1.0);
        assert_eq!(stored_time(&profile, None, &gemm(1), StoredKernels::AsPlain, time), time(&gemm(1)));
    }

    #[test]
    fn four_bit_products_of_external_engines_reach_less_than_plain_ones() {
        let time_of = |id: &str, format, rows, kernels| {
            let profile = part(id).unwrap().profile();
            stored_time(&profile, Some(format), &gemm(rows), kernels, |sig| profile.time(sig)).0
        };
        let slower = |id, format, rows, kernels| {
            time_of(id, format, rows, kernels) / time_of(id, format, rows, StoredKernels::AsPlain)
        };
        // converted in any model, for few rows and for many
        for kernels in [StoredKernels::OfDense, StoredKernels::OfMixture] {
            near(slower("H100-SXM-80GB", WeightFormat::Int4, 1, kernels), 1.0 / CONVERTED);
            near(slower("H100-SXM-80GB", WeightFormat::Mxfp4, 8192, kernels), 1.0 / CONVERTED);
            near(slower("H100-SXM-80GB", WeightFormat::Int8, 1, kernels), 1.0);
        }
        let [few, many] = [1, 8192].map(|rows| {
            let more =
                time_of("B200-SXM", WeightFormat::Nvfp4, rows, StoredKernels::OfDense) - QUANTISE_ROWS.0;
            more / time_of("B200-SXM", WeightFormat::Nvfp4, rows, StoredKernels::AsPlain)
        });
        near(few, 1.0 / MULTIPLIED[0]);
        near(many, 1.0 / MULTIPLIED[1]);
        near(slower("B200-SXM", WeightFormat::Nvfp4, 1, StoredKernels::OfMixture), 1.0);
    }
}
