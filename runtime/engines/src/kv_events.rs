//! Events of an engine's KV cache: vLLM's, in MessagePack, as maps (since 0.32) and as arrays (before, and
//! SGLang's shorter form).
//!
//! ```text
//! frames    [topic, sequence number (u64, big-endian), payload]
//! payload   [time, [event...], rank]
//! event     {"type": "BlockStored", "block_hashes": [...], ...} or ["BlockStored", [...], ...]
//! ```
//!
//! Unknown trailing fields and events of other types are skipped, so that a newer engine is understood as far
//! as it is compatible.

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// Maximum depth of a payload: extra keys are lists in a list in an event in a list.
const DEPTH_MAX: usize = 16;
/// Room that is made ahead for a list, however long it says that it is.
const AHEAD_MAX: usize = 1024;
/// Maximum tokens of a block.
const BLOCK_TOKENS_MAX: u64 = 1 << 16;

/// A batch of events of one rank of an engine.
#[derive(Clone, Debug, PartialEq)]
pub struct KvEventBatch {
    /// When it was sent, in seconds by the engine's clock.
    pub sent_at_s: f64,
    /// The events, in order.
    pub events: Vec<KvEvent>,
    /// The data-parallel rank, if the engine has several.
    pub rank: Option<u32>,
}

/// A change of an engine's KV cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvent {
    /// Blocks are there now, one behind the other.
    Stored(StoredKv),
    /// Blocks are gone.
    Removed {
        /// Their hashes.
        hashes: Vec<EngineHash>,
        /// Where they were, in the engine's word; none is its device.
        medium: Option<String>,
        /// The group of layers whose KV they held; 0 if not reported.
        group: u32,
    },
    /// No block is there any more.
    Cleared,
    /// Something else, by its name.
    Other(String),
}

/// Blocks that an engine stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredKv {
    /// Their hashes, in order.
    pub hashes: Vec<EngineHash>,
    /// The hash of the block before the first; none at the start of a prompt.
    pub parent: Option<EngineHash>,
    /// Tokens of all blocks together, in order.
    pub token_ids: Vec<u32>,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Where they are, in the engine's word; none is its device.
    pub medium: Option<String>,
    /// The LoRA adapter that computed them.
    pub lora: Option<String>,
    /// How many of the first ones have nothing beside tokens and adapter in their hashes, such as images or a
    /// salt.
    pub plain_blocks: usize,
    /// The group of layers whose KV they hold; 0 if not reported.
    pub group: u32,
}

/// An engine's hash of a block and all before it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EngineHash {
    /// 64 bits; engines write them with or without a sign.
    Number(u64),
    /// Bytes of a longer hash.
    Bytes(Box<[u8]>),
}

impl KvEventBatch {
    /// Reads a payload.
    ///
    /// # Errors
    /// The difference from vLLM's events.
    pub fn decode(payload: &[u8]) -> Result<Self, String> {
        let mut reader = rmp_serde::Deserializer::from_read_ref(payload);
        reader.set_max_depth(DEPTH_MAX);
        let packed =
            PackedValue::deserialize(&mut reader).map_err(|error| format!("not MessagePack: {error}"))?;
        let PackedValue::List(parts) = packed else { return Err("the batch is not a list".into()) };
        let mut parts = parts.into_iter();
        let sent_at_s = match parts.next() {
            Some(PackedValue::Float(seconds)) if seconds.is_finite() => seconds,
            Some(PackedValue::Unsigned(seconds)) => seconds as f64,
            _ => return Err("the batch has no time".into()),
        };
        let Some(PackedValue::List(events)) = parts.next() else {
            return Err("the batch has no list of events".into());
        };
        let rank = parts.next().and_then(PackedValue::unsigned).and_then(|rank| u32::try_from(rank).ok());
        let events = events.into_iter().map(KvEvent::read).collect::<Result<_, _>>()?;
        Ok(KvEventBatch { sent_at_s, events, rank })
    }
}

/// Names of fields in the order in which arrays have them, behind the type.
const STORED: [&str; 10] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
];
const REMOVED: [&str; 3] = ["block_hashes", "medium", "group_idx"];
/// Kinds of layers that see all earlier tokens. Blocks of other kinds prove no prefix, and may be only some
/// of its blocks.
const SEE_ALL: [&str; 3] = ["full_attention", "mla_attention", "sink_full_attention"];

impl KvEvent {
    fn read(event: PackedValue) -> Result<Self, String> {
        let (kind, mut fields) = match event {
            PackedValue::Map(fields) => {
                let mut fields = EventFields::Named(fields);
                (fields.take("type", &[]), fields)
            }
            PackedValue::List(values) => {
                let mut values = values.into_iter().map(Some).collect::<Vec<_>>();
                let kind = values.first_mut().and_then(Option::take);
                (kind, EventFields::InOrder(values))
            }
            // an event without fields may be its name alone
            PackedValue::Text(name) => (Some(PackedValue::Text(name)), EventFields::InOrder(Vec::new())),
            _ => return Err("an event must be a map or a list".into()),
        };
        let Some(PackedValue::Text(kind)) = kind else {
            return Err("an event has no type".into());
        };
        match kind.as_str() {
            "BlockStored" => {
                let layers = fields.take("kv_cache_spec_kind", &STORED).and_then(PackedValue::text);
                match layers.filter(|layers| !SEE_ALL.contains(&layers.as_str())) {
                    Some(layers) => Ok(KvEvent::Other(short(&layers))),
                    None => Ok(KvEvent::Stored(StoredKv::read(&mut fields)?)),
                }
            }
            "BlockRemoved" => {
                let hashes = hashes(fields.take("block_hashes", &REMOVED))?;
                let medium = fields.take("medium", &REMOVED).and_then(PackedValue::text);
                Ok(KvEvent::Removed { hashes, medium, group: group(fields.take("group_idx", &REMOVED)) })
            }
            "AllBlocksCleared" => Ok(KvEvent::Cleared),
            _ => Ok(KvEvent::Other(short(&kind))),
        }
    }
}

fn short(name: &str) -> String {
    name.chars().take(64).collect()
}

fn group(value: Option<PackedValue>) -> u32 {
    value.and_then(PackedValue::unsigned).and_then(|group| u32::try_from(group).ok()).unwrap_or(0)
}

impl StoredKv {
    fn read(fields: &mut EventFields) -> Result<Self, String> {
        let mut take = |name| fields.take(name, &STORED);
        let hashes = hashes(take("block_hashes"))?;
        let parent = match take("parent_block_hash") {
            None | Some(PackedValue::Nothing) => None,
            Some(value) => Some(hash(value)?),
        };
        let Some(PackedValue::List(ids)) = take("token_ids") else {
            return Err("stored blocks have no token ids".into());
        };
        let id = |value: PackedValue| value.unsigned().and_then(|id| u32::try_from(id).ok());
        let token_ids: Option<Vec<u32>> = ids.into_iter().map(id).collect();
        let token_ids = token_ids.ok_or("a token id is no number of 32 bits")?;
        let size = take("block_size")
            .and_then(PackedValue::unsigned)
            .filter(|size| (1..=BLOCK_TOKENS_MAX).contains(size));
        let size = size.ok_or("stored blocks have no size")?;
        if hashes.len() as u64 * size != token_ids.len() as u64 {
            return Err(format!("{} blocks of {size} have {} tokens", hashes.len(), token_ids.len()));
        }
        let lora_id = take("lora_id").and_then(PackedValue::unsigned).map(|id| id.to_string());
        let medium = take("medium").and_then(PackedValue::text);
        let lora = take("lora_name").and_then(PackedValue::text).or(lora_id);
        let plain_blocks = match take("extra_keys") {
            Some(PackedValue::List(keys)) => keys
                .iter()
                .position(|key| *key != PackedValue::Nothing)
                .unwrap_or(hashes.len())
                .min(hashes.len()),
            None | Some(PackedValue::Nothing) => hashes.len(),
            Some(_) => 0,
        };
        let group = group(take("group_idx"));
        let block_tokens = u32::try_from(size).map_err(|error| error.to_string())?;
        Ok(StoredKv { hashes, parent, token_ids, block_tokens, medium, lora, plain_blocks, group })
    }
}

fn hashes(value: Option<PackedValue>) -> Result<Vec<EngineHash>, String> {
    match value {
        Some(PackedValue::List(values)) => values.into_iter().map(hash).collect(),
        _ => Err("an event has no list of hashes".into()),
    }
}

fn hash(value: PackedValue) -> Result<EngineHash, String> {
    match value {
        PackedValue::Unsigned(bits) => Ok(EngineHash::Number(bits)),
        PackedValue::Signed(bits) => Ok(EngineHash::Number(bits.cast_unsigned())),
        PackedValue::Bytes(bytes) if !bytes.is_empty() => Ok(EngineHash::Bytes(bytes.into())),
        _ => Err("a hash must be a number or bytes".into()),
    }
}

/// The fields of an event in either form.
enum EventFields {
    Named(Vec<(PackedValue, PackedValue)>),
    /// With the type in front, which was taken.
    InOrder(Vec<Option<PackedValue>>),
}

impl EventFields {
    /// A field by its name, which stands at its place in `order` behind the type.
    fn take(&mut self, name: &str, order: &[&str]) -> Option<PackedValue> {
        match self {
            EventFields::Named(fields) => {
                let at = fields
                    .iter()
                    .position(|(key, _)| matches!(key, PackedValue::Text(key) if key == name))?;
                Some(fields.swap_remove(at).1)
            }
            EventFields::InOrder(values) => {
                let at = order.iter().position(|known| *known == name)?;
                values.get_mut(at + 1)?.take()
            }
        }
    }
}

/// A value in MessagePack.
#[derive(Clone, Debug, PartialEq)]
enum PackedValue {
    Nothing,
    Bool,
    Unsigned(u64),
    /// Below 0.
    Signed(i64),
    Float(f64),
    Text(String),
    Bytes(Vec<u8>),
    List(Vec<PackedValue>),
    Map(Vec<(PackedValue, PackedValue)>),
}

impl PackedValue {
    fn unsigned(self) -> Option<u64> {
        match self {
            PackedValue::Unsigned(number) => Some(number),
            _ => None,
        }
    }

    fn text(self) -> Option<String> {
        match self {
            PackedValue::Text(text) => Some(text),
            _ => None,
        }
    }
}

impl<'de> Deserialize<'de> for PackedValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = PackedValue;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }

            fn visit_unit<E>(self) -> Result<PackedValue, E> {
                Ok(PackedValue::Nothing)
            }

            fn visit_none<E>(self) -> Result<PackedValue, E> {
                Ok(PackedValue::Nothing)
            }

            fn visit_bool<E>(self, _: bool) -> Result<PackedValue, E> {
                Ok(PackedValue::Bool)
            }

            fn visit_u64<E>(self, number: u64) -> Result<PackedValue, E> {
                Ok(PackedValue::Unsigned(number))
            }

            fn visit_i64<E>(self, number: i64) -> Result<PackedValue, E> {
                Ok(u64::try_from(number).map_or(PackedValue::Signed(number), PackedValue::Unsigned))
            }

            fn visit_f64<E>(self, number: f64) -> Result<PackedValue, E> {
                Ok(PackedValue::Float(number))
            }

            fn visit_str<E>(self, text: &str) -> Result<PackedValue, E> {
                Ok(PackedValue::Text(text.to_owned()))
            }

            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<PackedValue, E> {
                Ok(PackedValue::Bytes(bytes.to_vec()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<PackedValue, A::Error> {
                let mut values = Vec::with_capacity(seq.size_hint().unwrap_or(0).min(AHEAD_MAX));
                while let Some(value) = seq.next_element()? {
                    values.push(value);
                }
                Ok(PackedValue::List(values))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<PackedValue, A::Error> {
                let mut entries = Vec::with_capacity(map.size_hint().unwrap_or(0).min(AHEAD_MAX));
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(PackedValue::Map(entries))
            }

            fn visit_newtype_struct<D: Deserializer<'de>>(self, _: D) -> Result<PackedValue, D::Error> {
                Err(D::Error::custom("a value of an unknown type"))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

/// Reads the three frames of a message: its number and payload.
///
/// # Errors
/// The fault of the frames.
pub fn split_frames<'a>(frames: &[&'a [u8]]) -> Result<(u64, &'a [u8]), String> {
    let [_topic, number, payload] = frames else {
        return Err(format!("a message of KV events has 3 frames, not {}", frames.len()));
    };
    let number: [u8; 8] = (*number).try_into().map_err(|_| "the number of a batch has 8 bytes".to_owned())?;
    Ok((u64::from_be_bytes(number), payload))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn packed(value: &Value) -> Vec<u8> {
        rmp_serde::to_vec(value).unwrap()
    }

    fn event(value: Value) -> Result<KvEvent, String> {
        KvEventBatch::decode(&packed(&json!([1.5, [value], 0]))).map(|batch| batch.events[0].clone())
    }

    fn stored() -> StoredKv {
        StoredKv {
            hashes: vec![EngineHash::Number(7), EngineHash::Number(u64::MAX)],
            parent: Some(EngineHash::Number(5)),
            token_ids: vec![1, 2, 3, 4],
            block_tokens: 2,
            medium: Some("GPU".into()),
            lora: None,
            plain_blocks: 2,
            group: 0,
        }
    }

    #[test]
    fn maps_and_arrays_say_the_same() {
        let map = json!({"type": "BlockStored", "block_hashes": [7, -1], "parent_block_hash": 5, "token_ids": [1, 2, 3, 4],
            "block_size": 2, "medium": "GPU", "group_idx": 0, "kv_cache_spec_kind": "full_attention"});
        assert_eq!(event(map), Ok(KvEvent::Stored(stored())));
        let array = json!([
            "BlockStored",
            [7, u64::MAX],
            5,
            [1, 2, 3, 4],
            2,
            null,
            "GPU",
            null,
            null,
            0,
            "full_attention"
        ]);
        assert_eq!(event(array), Ok(KvEvent::Stored(stored())));
        let short = json!(["BlockStored", [7, -1], null, [1, 2, 3, 4], 2, null]);
        let bare = StoredKv { parent: None, medium: None, ..stored() };
        assert_eq!(event(short), Ok(KvEvent::Stored(bare.clone())));
        let lora = json!({"type": "BlockStored", "block_hashes": [7, -1], "token_ids": [1, 2, 3, 4], "block_size": 2,
            "lora_id": 3, "lora_name": "fr", "extra_keys": [null, ["salt"]], "kv_cache_spec_kind": "mla_attention"});
        let of_lora = StoredKv { lora: Some("fr".into()), plain_blocks: 1, ..bare };
        assert_eq!(event(lora), Ok(KvEvent::Stored(of_lora)));
        let removed =
            KvEvent::Removed { hashes: vec![EngineHash::Number(9)], medium: Some("CPU".into()), group: 1 };
        assert_eq!(
            event(json!({"type": "BlockRemoved", "block_hashes": [9], "medium": "CPU", "group_idx": 1})),
            Ok(removed.clone())
        );
        assert_eq!(event(json!(["BlockRemoved", [9], "CPU", 1])), Ok(removed));
        // layers with a window store only some blocks
        let window = json!({"type": "BlockStored", "block_hashes": [7], "token_ids": [1, 2, 3, 4], "block_size": 2,
            "kv_cache_spec_kind": "sliding_window"});
        assert_eq!(event(window), Ok(KvEvent::Other("sliding_window".into())));
        for cleared in
            [json!({"type": "AllBlocksCleared"}), json!(["AllBlocksCleared"]), json!("AllBlocksCleared")]
        {
            assert_eq!(event(cleared), Ok(KvEvent::Cleared));
        }
        assert_eq!(event(json!(["Later", 1])), Ok(KvEvent::Other("Later".into())));
    }

    #[test]
    fn hashes_may_be_bytes() {
        // [1.0, [["BlockRemoved", [bytes ab cd]]]]
        let mut payload = vec![0x92, 0xcb];
        payload.extend_from_slice(&1.0_f64.to_be_bytes());
        payload.extend_from_slice(&[0x91, 0x92, 0xac]);
        payload.extend_from_slice(b"BlockRemoved");
        payload.extend_from_slice(&[0x91, 0xc4, 2, 0xab, 0xcd]);
        let batch = KvEventBatch::decode(&payload).unwrap();
        let hashes = vec![EngineHash::Bytes([0xab, 0xcd].into())];
        assert_eq!(
            (batch.rank, batch.events),
            (None, vec![KvEvent::Removed { hashes, medium: None, group: 0 }])
        );
    }

    #[test]
    fn what_does_not_add_up_is_refused() {
        for wrong in [
            json!({"block_hashes": [1]}),
            json!({"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 2}),
            json!({"type": "BlockStored", "block_hashes": [1], "token_ids": [1, -2], "block_size": 2}),
            json!({"type": "BlockStored", "block_hashes": ["x"], "token_ids": [1, 2], "block_size": 2}),
            json!({"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2], "block_size": 0}),
            json!({"type": "BlockRemoved"}),
            json!([]),
            json!(7),
        ] {
            assert!(event(wrong.clone()).is_err(), "{wrong}");
        }
        for wrong in [json!([]), json!({}), json!([1.0]), json!(["x", []]), json!([1.0, 7])] {
            assert!(KvEventBatch::decode(&packed(&wrong)).is_err(), "{wrong}");
        }
        let deep = [vec![0x91; 100_000], vec![0xc0]].concat();
        assert!(KvEventBatch::decode(&deep).is_err());
        // a list that says that it has 4 billion elements
        assert!(KvEventBatch::decode(&[0xdd, 0xff, 0xff, 0xff, 0xff]).is_err());
    }

    #[test]
    fn a_message_has_three_frames() {
        let number = 258_u64.to_be_bytes();
        assert_eq!(split_frames(&[b"kv", &number, b"x"]), Ok((258, &b"x"[..])));
        assert!(split_frames(&[b"kv", &number]).is_err());
        assert!(split_frames(&[b"kv", &number[1..], b"x"]).is_err());
    }

    fn hash_strategy() -> impl Strategy<Value = u64> {
        prop_oneof![0..1000_u64, any::<u64>()]
    }

    proptest! {
        #[test]
        fn what_was_written_is_read_back(
            hashes in proptest::collection::vec(hash_strategy(), 0..9), parent in proptest::option::of(hash_strategy()),
            block in 1..5_u32, first in any::<u32>(), as_map in any::<bool>(), rank in proptest::option::of(0..9_u32),
        ) {
            let tokens: Vec<u32> = (0..hashes.len() as u32 * block).map(|at| first.wrapping_add(at)).collect();
            let written = match as_map {
                true => json!({"block_size": block, "token_ids": tokens, "type": "BlockStored", "block_hashes": hashes,
                    "parent_block_hash": parent}),
                false => json!(["BlockStored", hashes, parent, tokens, block]),
            };
            let batch = KvEventBatch::decode(&packed(&json!([2.0, [written], rank]))).unwrap();
            let expected = StoredKv {
                plain_blocks: hashes.len(),
                group: 0,
                hashes: hashes.into_iter().map(EngineHash::Number).collect(),
                parent: parent.map(EngineHash::Number),
                token_ids: tokens,
                block_tokens: block,
                medium: None,
                lora: None,
            };
            prop_assert_eq!(batch, KvEventBatch { sent_at_s: 2.0, events: vec![KvEvent::Stored(expected)], rank });
        }

        #[test]
        fn hostile_bytes_are_refused_and_nothing_more(
            noise in proptest::collection::vec(any::<u8>(), 0..64), at in any::<prop::sample::Index>(), byte in any::<u8>(),
        ) {
            let _ = KvEventBatch::decode(&noise);
            let event = json!(["BlockStored", [1, 2], 3, [1, 2, 3, 4], 2, null, "GPU", "l", [null, ["k"]]]);
            let mut damaged = packed(&json!([1.0, [event, {"type": "BlockRemoved", "block_hashes": [1]}], 0]));
            let place = at.index(damaged.len());
            damaged[place] = byte;
            let _ = KvEventBatch::decode(&damaged);
            damaged.truncate(place);
            prop_assert!(KvEventBatch::decode(&damaged).is_err());
        }
    }
}
