//! Attention over parts of the KV: any division by tokens recombines to the whole, and to prefill.

use crate::common;
use mixfleet_hal::{BufferUsage, Cmd, DType, Device, KvShape, OpSig, Slice};
use proptest::collection::vec;
use proptest::prelude::*;
use std::sync::Arc;

const HEADS: u32 = 4;
const KV_HEADS: u32 = 2;
const PAGE: u32 = 4;
const PAGES: u32 = 12;
const TOKENS: u32 = PAGE * PAGES;

/// Pools of a device, and a query that stands at their end.
struct Bench {
    device: Arc<dyn Device>,
    head_dim: u32,
    kv: DType,
    q: Slice,
    pages: Slice,
    pools: [Slice; 2],
}

impl Bench {
    fn new(head_dim: u32, kv: DType, seed: u8) -> Self {
        let device = common::device("sim:test");
        let alloc = |bytes: u32| device.alloc(u64::from(bytes), BufferUsage::Activations).unwrap();
        let shape = KvShape { kv_heads: KV_HEADS, head_dim, page_tokens: PAGE, dtype: kv, latent: None };
        let width = (shape.row() * kv.size_bytes()) as u32;
        let bench = Bench {
            q: alloc(HEADS * head_dim * 4),
            pages: alloc(PAGES * 4),
            pools: [alloc(TOKENS * width), alloc(TOKENS * width)],
            device: device.clone(),
            head_dim,
            kv,
        };
        let noise = |slice: &Slice, salt: u64| {
            // exponents stay in range: no NaN, whose bits a conversion may change
            let bytes = (0..slice.bytes).map(|i| mixfleet_hal::random::bits(salt, i) as u8 & 0x3F);
            bench.device.write(slice, &bytes.collect::<Vec<_>>()).unwrap();
        };
        noise(&bench.q, u64::from(seed));
        bench.pools.iter().zip(1u64..).for_each(|(pool, salt)| noise(pool, u64::from(seed) << 8 | salt));
        let order: Vec<u8> = (0..PAGES).flat_map(|i| (i * 5 % PAGES).to_le_bytes()).collect();
        bench.device.write(&bench.pages, &order).unwrap();
        bench
    }

    fn run(&self, sig: OpSig, args: &[Slice]) {
        let mut queue = self.device.queue().unwrap();
        let ticket = queue.submit(&[Cmd::new(sig, args).unwrap()]).unwrap();
        queue.wait(ticket, common::TIMEOUT).unwrap();
    }

    fn alloc(&self, elements: u32) -> Slice {
        self.device.alloc(u64::from(elements) * 4, BufferUsage::Activations).unwrap()
    }

    fn words(&self, words: &[u32]) -> Slice {
        let slice = self.alloc(words.len() as u32);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.device.write(&slice, &bytes).unwrap();
        slice
    }

    fn bytes(&self, slice: &Slice) -> Vec<u8> {
        let mut bytes = vec![0; slice.bytes as usize];
        self.device.read(slice, &mut bytes).unwrap();
        bytes
    }

    /// The merged result of attention over these parts: `[heads, head_dim]` f32.
    fn parts(&self, ranges: &[(u32, u32)]) -> Vec<u8> {
        let (head_dim, parts) = (self.head_dim, ranges.len() as u32);
        let acc = self.alloc(parts * HEADS * head_dim);
        let stat = self.alloc(parts * HEADS * 2);
        for (at, &(first, end)) in (0u64..).zip(ranges) {
            let sig = OpSig::AttnDecode {
                sequences: 1,
                kv_tokens: u64::from(end.saturating_sub(first)),
                heads: HEADS,
                pages_max: PAGES,
                x: DType::F32,
                kv: KvShape { kv_heads: KV_HEADS, head_dim, page_tokens: PAGE, dtype: self.kv, latent: None },
                cap: None,
            };
            let (acc_bytes, stat_bytes) = (u64::from(HEADS * head_dim * 4), u64::from(HEADS * 8));
            let [k, v] = self.pools.clone();
            let range = self.words(&[first, end]);
            let acc = acc.range(at * acc_bytes, acc_bytes);
            let stat = stat.range(at * stat_bytes, stat_bytes);
            self.run(sig, &[self.q.clone(), range, self.pages.clone(), k, v, acc, stat]);
        }
        let out = self.alloc(HEADS * head_dim);
        let sig = OpSig::AttnMerge { parts, rows: HEADS, head_dim, sinks: 0, out: DType::F32 };
        self.run(sig, &[acc, stat, out.clone()]);
        self.bytes(&out)
    }

    /// The same query at the end of a prefill.
    fn prefill(&self, first: u32, end: u32) -> Vec<u8> {
        let head_dim = self.head_dim;
        let sig = OpSig::AttnPrefill {
            tokens: 1,
            sequences: 1,
            pairs: u64::from(end - first),
            kv_tokens: u64::from(end - first),
            heads: HEADS,
            pages_max: PAGES,
            window: Some(end - first),
            sinks: false,
            x: DType::F32,
            kv: KvShape { kv_heads: KV_HEADS, head_dim, page_tokens: PAGE, dtype: self.kv, latent: None },
            cap: None,
        };
        let out = self.alloc(HEADS * head_dim);
        let [k, v] = self.pools.clone();
        let (starts, context) = (self.words(&[0, 1]), self.words(&[end]));
        self.run(sig, &[self.q.clone(), starts, context, self.pages.clone(), k, v, out.clone()]);
        self.bytes(&out)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn parts_recombine_to_the_whole_and_to_prefill(
        head_dim in prop::sample::select(vec![2u32, 4, 6, 16, 64]), seed in 0..200u8,
        kv in prop::sample::select(vec![DType::F32, DType::Bf16, DType::F16, DType::F8E4m3]),
        cuts in vec(0..=TOKENS, 2..8),
    ) {
        prop_assume!(!kv.is_scaled() || head_dim.is_multiple_of(4));
        let bench = Bench::new(head_dim, kv, seed);
        let mut cuts = cuts;
        cuts.sort_unstable();
        let (first, end) = (cuts[0], cuts[cuts.len() - 1]);
        prop_assume!(first < end);
        let whole = bench.parts(&[(first, end)]);
        let mut ranges: Vec<(u32, u32)> = cuts.windows(2).map(|cut| (cut[0], cut[1])).collect();
        prop_assert_eq!(&bench.parts(&ranges), &whole);
        ranges.reverse();
        prop_assert_eq!(&bench.parts(&ranges), &whole);
        prop_assert_eq!(&bench.prefill(first, end), &whole);
        // a part less or twice is noticed
        if let Some(at) = ranges.iter().position(|(first, end)| first < end) {
            let doubled = [&ranges[..], &ranges[at..=at]].concat();
            prop_assert_ne!(&bench.parts(&doubled), &whole);
            ranges.remove(at);
            prop_assert_ne!(&bench.parts(&ranges), &whole);
        }
    }
}

#[test]
fn nothing_to_see_gives_zero_and_a_lost_bit_of_a_part_is_noticed() {
    let bench = Bench::new(16, DType::Bf16, 1);
    assert!(bench.parts(&[(3, 3), (9, 9)]).iter().all(|&byte| byte == 0));
    let whole = bench.parts(&[(0, 9)]);
    assert!(whole.iter().any(|&byte| byte != 0));
    assert_ne!(bench.parts(&[(0, 8)]), whole);
    assert_ne!(bench.parts(&[(1, 9)]), whole);
}

#[test]
fn indices_that_name_nothing_are_errors_and_fail_the_queue() {
    let bench = Bench::new(16, DType::Bf16, 1);
    let embed = |id| {
        let sig = OpSig::Embed { tokens: 1, vocab: 4, hidden: 8, table: DType::F32, out: DType::F32 };
        Cmd::new(sig, &[bench.words(&[id]), bench.alloc(32), bench.alloc(8)]).unwrap()
    };
    let mut queue = bench.device.queue().unwrap();
    let good = queue.submit(&[embed(3)]).unwrap();
    let bad = queue.submit(&[embed(4)]).unwrap();
    let later = queue.submit(&[embed(0)]).unwrap();
    queue.wait(good, common::TIMEOUT).unwrap();
    for ticket in [bad, later] {
        let error = queue.wait(ticket, common::TIMEOUT).unwrap_err();
        assert!(error.detail.contains("id 4 is outside a table of 4 rows"), "{error}");
    }
    // another queue is not concerned
    let mut other = bench.device.queue().unwrap();
    let ticket = other.submit(&[embed(0)]).unwrap();
    other.wait(ticket, common::TIMEOUT).unwrap();
}
