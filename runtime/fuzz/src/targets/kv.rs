//! Parser of the KV that external engines write.

use super::http::{MODEL, check_answer, exchange_with, split};
use mixfleet_hal::DType;
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::op::KvShape;
use mixfleet_runtime::engine::Identity;
use mixfleet_runtime::kv_exchange::{KvExchange, KvExchangeParts};
use mixfleet_runtime::metrics::Metrics;
use mixfleet_runtime::pool::{Pool, PoolConfig};
use mixfleet_wire::HostRegion;
use serde_json::Value;
use std::sync::Arc;

/// Blocks that there is room for.
const ROOM: usize = 4;

/// A process with room for some blocks of two tokens; those of the corpus are of its namespace.
fn kv_exchange() -> Arc<KvExchange> {
    let region = |bytes: u64| -> mixfleet_hal::Result<Arc<dyn SharedMemory>> {
        Ok(Arc::new(HostRegion::new(to_usize(bytes))?))
    };
    let config = PoolConfig {
        block_bytes: 16,
        block_tokens: 2,
        namespace: 0,
        dram_bytes: 16 * ROOM as u64,
        ssd: None,
    };
    let parts = KvExchangeParts {
        url: "http://here:1".into(),
        identity: Identity::new("shape".into(), "tokenizer".into(), [1, 2]),
        layers: 1,
        kv: KvShape { kv_heads: 1, head_dim: 1, page_tokens: 2, dtype: DType::F32, latent: None },
        pools: vec![Pool::new(config, &region).expect("a small pool")],
        metrics: Metrics::new(),
    };
    let exchange = parts.open().expect("one pool");
    exchange.know("weights".into());
    Arc::new(exchange)
}

/// Checks that accepted blocks are returned bit by bit.
pub(super) fn write(bytes: &[u8]) -> bool {
    let kv = kv_exchange();
    let head = format!(
        "POST /v1/kv/write HTTP/1.1\r\nhost: api\r\nconnection: close\r\ncontent-type: application/octet-stream\r\n\
         content-length: {}\r\n\r\n",
        bytes.len()
    );
    let answer = exchange_with(&[head.as_bytes(), bytes].concat(), false, Some(kv.clone()));
    if check_answer(&answer) != 200 {
        return false;
    }
    let (length, rest) = bytes.split_first_chunk().expect("a length");
    let (head, frames) = rest.split_at(to_usize(u64::from_le_bytes(*length)));
    let head: Value = serde_json::from_slice(head).expect("it was taken");
    assert_eq!(head["model"], MODEL);
    let told: Value = serde_json::from_str(&split(&answer).1).expect("a document");
    assert_eq!(told["blocks"].as_u64(), Some((frames.len() / kv.frame_bytes().expect("known")) as u64));
    // of more than there is room for the beginning has gone
    if head["first"].as_f64().unwrap_or(0.0) == 0.0 && frames.len() <= ROOM * kv.frame_bytes().expect("known")
    {
        let ids = head["prompt"].as_array().expect("ids").iter();
        let ids = ids.filter_map(|id| u32::try_from(id.as_f64()?.to_string().parse::<u64>().ok()?).ok());
        let salt = head["cache_salt"].as_str().map(str::to_owned);
        let prompt = kv.prompt(ids.collect(), salt).expect("known");
        assert_eq!(kv.frames(&prompt, 0, frames.len()).get(..frames.len()), Some(frames));
    }
    true
}
