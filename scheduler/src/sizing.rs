//! The size of an instance: KV memory, tokens of a step and sequences, from what its device has.
//!
//! - A step of a prompt should be bound by arithmetic. A matrix product over `n` rows of tokens reads each
//!   weight once for 2n operations, so that at `n = ridge * bytes of a weight / 2` rows reading and computing
//!   take equally long (Williams et al. 2009, roofline). A chunk has several times as many rows.
//! - KV gets the memory that is free once the weights are placed, less step buffers and a reserve.
//! - As many sequences run as KV memory holds at a usual length.

use crate::cost::{EXPANDED_TOKENS, ModelShape};
use mixfleet_hal::DType;
use mixfleet_hal::cast::{to_u32, to_u64};
use mixfleet_hal::catalog::Part;
use mixfleet_hal::units::Bytes;

/// The rows of a chunk as a multiple of the rows at which arithmetic and bandwidth are even.
const CHUNK_RIDGES: f64 = 8.0;
/// Bounds of a chunk, in tokens.
const CHUNK_MIN: u32 = 512;
const CHUNK_MAX: u32 = 8192;
// the longest step of prompts without earlier chunks has room for their expanded keys
const _: () = assert!(CHUNK_MAX <= EXPANDED_TOKENS);
/// The share of a device's memory that is left free: for libraries, fragments and staging buffers.
const RESERVE: f64 = 0.1;
/// The share that weights and KV may fill, as in the defaults of serving engines.
pub const MEMORY_SHARE: f64 = 1.0 - RESERVE;
/// Bytes in a catalog's GB of memory, since chips come in powers of two.
const BYTES_PER_GB: f64 = 1_073_741_824.0;
/// Memory that an external engine's largest step, its recorded graphs and the driver take.
const EXTERNAL_BYTES: f64 = 1.5e9;
/// The share of the host's free memory that KV takes.
const HOST_SHARE: f64 = 0.25;
/// Length of a sequence for which there should be room, in tokens.
const SEQUENCE_TOKENS: u64 = 1024;
/// Bounds of the number of sequences; that of host processors is lower, since arithmetic binds them early.
const SEQUENCES_MIN: u32 = 8;
const SEQUENCES_MAX: u32 = 256;
const HOST_SEQUENCES_MAX: u32 = 64;
/// KV memory holds at most this many whole contexts per sequence: more finds no use.
const CONTEXTS_PER_SEQUENCE: u64 = 4;

/// The bytes that weights and KV may fill of a device with `memory`, as the catalog states it. External
/// engines fill their share of all of it, less what else they allocate.
pub fn usable_bytes(memory: Bytes, is_external: bool) -> f64 {
    match is_external {
        true => (memory.0 * (BYTES_PER_GB / 1e9) * MEMORY_SHARE - EXTERNAL_BYTES).max(0.0),
        false => memory.0 * MEMORY_SHARE,
    }
}

/// What an instance can use of its device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceRoom {
    /// Memory that is free once the weights are placed.
    pub free: Bytes,
    /// All of its memory.
    pub total: Bytes,
    /// Whether that is the host's memory, which others need too.
    pub is_host: bool,
    /// The ridge of its roofline, in FLOP per byte; none if unknown.
    pub ridge: Option<f64>,
}

/// Limits given by the user, rather than chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GivenSizes {
    /// KV memory.
    pub kv: Option<Bytes>,
    /// Maximum new tokens in a step.
    pub step_tokens_max: Option<u32>,
    /// Maximum concurrent sequences.
    pub sequences_max: Option<u32>,
}

/// The size of an instance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InstanceSize {
    /// KV memory; 0 if nothing is left for it.
    pub kv: Bytes,
    /// Maximum new tokens in a step.
    pub step_tokens_max: u32,
    /// Maximum concurrent sequences.
    pub sequences_max: u32,
    /// Memory of the largest step's activations.
    pub activations: Bytes,
}

/// The ridge of a part's roofline in FLOP per byte, for products in `dtype`; none without units for it.
pub fn ridge(part: &Part, dtype: DType) -> Option<f64> {
    Some(part.rates.of(dtype)?.0 / part.bandwidth().0)
}

/// Prompt tokens of a step on a device with this ridge: several times as many rows as those at which reading
/// the weights takes as long as computing with them.
pub fn step_tokens(model: &ModelShape, ridge: Option<f64>) -> u32 {
    let even_rows = ridge.map_or(0.0, |ridge| ridge * model.weight_bits() / 8.0 / 2.0);
    let chunk = 2f64.powf((even_rows * CHUNK_RIDGES).max(1.0).log2().round());
    to_u32(chunk).clamp(CHUNK_MIN, CHUNK_MAX)
}

/// Chooses the size of an instance of `model`, whose sequences have up to `context` tokens.
pub fn size(model: &ModelShape, context: u32, room: &DeviceRoom, given: GivenSizes) -> InstanceSize {
    let step_tokens_max = given.step_tokens_max.unwrap_or_else(|| step_tokens(model, room.ridge));
    let most = if room.is_host { HOST_SEQUENCES_MAX } else { SEQUENCES_MAX };
    let sequences = given.sequences_max.unwrap_or(most);
    let activations = model.activation_bytes(step_tokens_max.max(sequences), sequences) as f64;
    let token_bytes = model.kv_bytes_per_token().max(1);
    let kv = given.kv.unwrap_or_else(|| {
        let free = if room.is_host {
            room.free.0 * HOST_SHARE
        } else {
            room.free.0 - room.total.0 * RESERVE - activations
        };
        let tokens = CONTEXTS_PER_SEQUENCE * u64::from(sequences) * u64::from(context);
        Bytes(free.clamp(0.0, tokens.saturating_mul(token_bytes) as f64))
    });
    let held = to_u64(kv.0) / token_bytes / SEQUENCE_TOKENS;
    let fitting = to_u32(held.min(most.into())) / SEQUENCES_MIN * SEQUENCES_MIN;
    InstanceSize {
        kv,
        step_tokens_max,
        sequences_max: given.sequences_max.unwrap_or(fitting.max(SEQUENCES_MIN)),
        activations: Bytes(activations),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models;
    use mixfleet_hal::DType;
    use mixfleet_hal::catalog::part;
    use mixfleet_hal::units::{GIB, MIB};

    const CONTEXT: u32 = 131_072;

    fn llama_8b() -> ModelShape {
        models::find("llama-3.1-8b").unwrap().shape(DType::Bf16)
    }

    /// A part whose driver reports `mib` of memory; a context takes 0.6 GB of it and the weights 16.06 GB.
    fn room(id: &str, mib: f64) -> DeviceRoom {
        let part = part(id).unwrap();
        let total = mib * MIB as f64;
        let ridge = part.rates.bf16.unwrap() * 1e12 / part.bandwidth().0;
        DeviceRoom {
            free: Bytes(total - 0.6e9 - 16.06e9),
            total: Bytes(total),
            is_host: false,
            ridge: Some(ridge),
        }
    }

    /// GiB of KV, tokens of a step, and sequences.
    fn sized(room: &DeviceRoom, given: GivenSizes) -> (f64, u32, u32) {
        let size = size(&llama_8b(), CONTEXT, room, given);
        ((size.kv.0 / GIB as f64 * 10.0).round() / 10.0, size.step_tokens_max, size.sequences_max)
    }

    #[test]
    fn an_8b_model_in_bf16_fits_cards_from_24_gb_and_gets_what_they_have() {
        let of = |id, mib| sized(&room(id, mib), GivenSizes::default());
        let all = [
            ("RTX-4090", 24_564.0),
            ("L40S", 46_068.0),
            ("H100-SXM-80GB", 81_559.0),
            ("H200-SXM-141GB", 143_771.0),
        ];
        let sizes = all.map(|(id, mib)| of(id, mib));
        assert_eq!(sizes, [(5.8, 1024, 40), (24.3, 4096, 192), (55.8, 2048, 256), (110.5, 2048, 256)]);
    }

    #[test]
    fn what_is_given_is_kept_and_the_rest_follows_from_it() {
        let h100 = room("H100-SXM-80GB", 81_559.0);
        let given = GivenSizes { kv: Some(Bytes(8e9)), step_tokens_max: Some(300), sequences_max: Some(17) };
        assert_eq!(sized(&h100, given), (7.5, 300, 17));
        assert_eq!(sized(&h100, GivenSizes { kv: given.kv, ..GivenSizes::default() }), (7.5, 2048, 56));
    }

    #[test]
    fn a_device_that_is_full_has_no_kv_and_a_small_model_no_more_than_it_can_use() {
        let full = DeviceRoom { free: Bytes(1e9), ..room("RTX-4090", 24_564.0) };
        assert_eq!(sized(&full, GivenSizes::default()), (0.0, 1024, SEQUENCES_MIN));
        let size = size(&llama_8b(), 100, &room("H100-SXM-80GB", 81_559.0), GivenSizes::default());
        assert_eq!(
            size.kv.0,
            4.0 * 256.0 * 100.0 * 131_072.0,
            "four contexts a sequence, of 128 KiB a token"
        );
    }

    #[test]
    fn external_engines_fill_gib_less_what_they_allocate() {
        let bytes = |is_external| usable_bytes(Bytes(80e9), is_external);
        assert_eq!((bytes(false), bytes(true)), (72e9, 80.0 * 1_073_741_824.0 * MEMORY_SHARE - 1.5e9));
        assert_eq!(usable_bytes(Bytes(1e9), true), 0.0);
    }

    #[test]
    fn the_host_lends_a_quarter_of_what_is_free() {
        let total = Bytes(64e9);
        let host = DeviceRoom { free: Bytes(32e9), total, is_host: true, ridge: None };
        let size = size(&llama_8b(), CONTEXT, &host, GivenSizes::default());
        assert_eq!((size.kv.0, size.step_tokens_max, size.sequences_max), (8e9, CHUNK_MIN, 56));
    }
}
