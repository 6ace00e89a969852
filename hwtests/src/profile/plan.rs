//! What each level measures: the shapes of public models, cheapest first.
//!
//! Products are measured as the engine runs them (`scheduler/src/layers`): activations and weights
//! of one dtype, the two that feed the residual stream added to f32, logits in f32. The (n, k) of four
//! families, of hidden size 1024, 2048 (TinyLlama 1.1B), 4096 (Llama 3 8B) and 8192 (Llama 3 70B), stand for
//! the ones in between.

use super::work::{
    HeadConfiguration, LaunchCase, SustainedLoad, WorkItem, attn_decode, attn_prefill, gemm, grouped_gemm,
    matches, route,
};
use mixfleet_hal::profile::Traffic;
use mixfleet_hal::units::{GIB, MIB};
use mixfleet_hal::{DType, GroupedRows, KvShape, OpSig, Scalar};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The level of detail of a profile, which bounds its duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ProfileLevel {
    /// Under a minute; enough to classify a part.
    Quick,
    /// Under five minutes; enough to predict a model on it.
    Default,
    /// Everything, within half an hour.
    Full,
}

impl ProfileLevel {
    /// The numbers of rows with which a model's own products are measured, in ascending order.
    pub fn rows(self) -> &'static [u32] {
        match self {
            ProfileLevel::Quick => &[1, 8, 9, 64, 512],
            ProfileLevel::Default => &[1, 2, 4, 8, 9, 16, 17, 24, 25, 32, 64, 128, 256, 512],
            ProfileLevel::Full => &[
                1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 20, 24, 25, 28, 32, 33, 48, 64, 65, 96, 128, 129, 192,
                256, 384, 512, 1024, 2048,
            ],
        }
    }
}

/// Product shapes of one model family.
struct FamilyShapes {
    hidden: u32,
    inner: u32,
    kv: u32,
    vocab: u32,
}

const FAMILIES: [FamilyShapes; 4] = [
    FamilyShapes { hidden: 2048, inner: 5632, kv: 256, vocab: 32_000 },
    FamilyShapes { hidden: 1024, inner: 3072, kv: 512, vocab: 32_000 },
    FamilyShapes { hidden: 4096, inner: 14_336, kv: 1024, vocab: 128_256 },
    FamilyShapes { hidden: 8192, inner: 28_672, kv: 1024, vocab: 128_256 },
];

/// Heads of Llama 3 8B and TinyLlama.
const WIDE: HeadConfiguration = HeadConfiguration { ratio: 4, kv: 8, dim: 128, rank: None };
const NARROW: HeadConfiguration = HeadConfiguration { ratio: 8, kv: 4, dim: 64, rank: None };
/// Heads over the latents of DeepSeek-V3, as one of eight devices has them.
const LATENT: HeadConfiguration = HeadConfiguration { ratio: 16, kv: 1, dim: 576, rank: Some(512) };

/// Returns the measurements of `level` on a device with pages of `page_tokens`, without duplicates; with
/// `only`, just those that one of its patterns selects. A pattern that is itself the name of a work item adds
/// it, and `model` has the operations of a model to measure.
pub fn plan(level: ProfileLevel, page_tokens: u32, model: &[OpSig], only: &[String]) -> Vec<WorkItem> {
    let mut p = ProfilePlan { level, page_tokens: page_tokens.max(1), works: Vec::new() };
    p.launches();
    p.memory();
    p.links();
    p.small(2048, 5632, 32, NARROW, 32_000);
    p.kv();
    p.gemms();
    p.experts();
    p.attention();
    if level != ProfileLevel::Quick {
        p.small(4096, 14_336, 32, WIDE, 128_256);
    }
    p.works.extend(model.iter().copied().map(WorkItem::Op));
    p.works.push(WorkItem::Sustained(SustainedLoad::Gemm));
    p.works.push(WorkItem::Sustained(SustainedLoad::Stream));
    let named = only.iter().filter_map(|id| WorkItem::parse(id, p.page_tokens));
    let mut works: Vec<WorkItem> = p.works.iter().copied().chain(named).collect();
    if !only.is_empty() {
        works.retain(|work| only.iter().any(|pattern| matches(pattern, work)));
    }
    let cost = |work: &WorkItem| match work {
        WorkItem::Op(sig) => sig.flops() + sig.bytes(),
        _ => 0.0,
    };
    works.sort_by(|a, b| a.group().cmp(&b.group()).then(cost(a).total_cmp(&cost(b))));
    let mut seen = std::collections::HashSet::new();
    works.retain(|work| seen.insert(work.id()));
    works
}

struct ProfilePlan {
    level: ProfileLevel,
    page_tokens: u32,
    works: Vec<WorkItem>,
}

impl ProfilePlan {
    fn op(&mut self, sig: OpSig) {
        self.works.push(WorkItem::Op(sig));
    }

    fn by_level<T: Copy>(
        &self,
        quick: &'static [T],
        default: &'static [T],
        full: &'static [T],
    ) -> &'static [T] {
        match self.level {
            ProfileLevel::Quick => quick,
            ProfileLevel::Default => default,
            ProfileLevel::Full => full,
        }
    }

    fn launches(&mut self) {
        let many = [LaunchCase::Commands(100), LaunchCase::Replay(100), LaunchCase::Chain(100)];
        for launch in [LaunchCase::Empty, LaunchCase::Commands(1)].into_iter().chain(many) {
            self.works.push(WorkItem::Launch(launch));
        }
    }

    fn memory(&mut self) {
        const K: u64 = 1 << 10;
        let sets = self.by_level(
            &[256 * K, 4 * MIB, 64 * MIB, 512 * MIB],
            &[64 * K, 256 * K, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 512 * MIB, GIB],
            &[
                64 * K,
                256 * K,
                MIB,
                2 * MIB,
                4 * MIB,
                8 * MIB,
                16 * MIB,
                32 * MIB,
                64 * MIB,
                128 * MIB,
                256 * MIB,
                512 * MIB,
                GIB,
                4 * GIB,
            ],
        );
        for &bytes in sets {
            for traffic in [Traffic::Read, Traffic::Write, Traffic::Copy] {
                self.works.push(WorkItem::Memory(traffic, bytes));
            }
        }
    }

    fn links(&mut self) {
        let sizes = self.by_level(
            &[4 << 10, 1 << 20, 64 << 20],
            &[4 << 10, 64 << 10, 1 << 20, 16 << 20, 128 << 20],
            &[
                4 << 10,
                16 << 10,
                64 << 10,
                256 << 10,
                1 << 20,
                4 << 20,
                16 << 20,
                64 << 20,
                256 << 20,
                1 << 30,
            ],
        );
        for &bytes in sizes {
            self.works.extend([WorkItem::HostToDevice(bytes), WorkItem::DeviceToHost(bytes)]);
            self.works.push(WorkItem::DeviceToDevice(bytes));
        }
    }

    fn small(&mut self, hidden: u32, inner: u32, heads: u32, of: HeadConfiguration, vocab: u32) {
        let x = DType::Bf16;
        let tokens =
            self.by_level(&[1, 32, 512], &[1, 8, 64, 512, 2048], &[1, 4, 16, 64, 256, 512, 1024, 4096]);
        for &tokens in tokens {
            self.op(OpSig::RmsNorm {
                rows: tokens,
                cols: hidden,
                eps: Scalar(1e-6),
                x: DType::F32,
                weight: x,
                out: x,
            });
            self.op(OpSig::Rope { tokens, heads, head_dim: of.dim, x, part: None });
            self.op(OpSig::Rope { tokens, heads: of.kv, head_dim: of.dim, x, part: None });
            self.op(OpSig::SiluMul { elements: u64::from(tokens) * u64::from(inner), x });
            self.op(OpSig::Add { elements: u64::from(tokens) * u64::from(hidden), x });
            self.op(OpSig::Embed { tokens, vocab, hidden, table: x, out: DType::F32 });
            let (kv_heads, head_dim, page_tokens) = (of.kv, of.dim, self.page_tokens);
            self.op(OpSig::KvWrite {
                tokens,
                x,
                kv: KvShape { kv_heads, head_dim, page_tokens, dtype: x, latent: None },
            });
            // a step has as many rows of logits and of merges as sequences
            if tokens <= 64 {
                self.op(OpSig::Sample { rows: tokens, cols: vocab, history: 0, tops: 0 });
                self.op(OpSig::AttnMerge { parts: 1, rows: tokens * heads, head_dim, sinks: 0, out: x });
            }
        }
        self.op(OpSig::AttnMerge { parts: 4, rows: 8 * heads, head_dim: of.dim, sinks: 0, out: x });
    }

    fn kv(&mut self) {
        let tokens = self.by_level(&[16, 512], &[16, 128, 512, 2048], &[16, 64, 128, 512, 2048, 8192]);
        let (kv, page_tokens) = (DType::Bf16, self.page_tokens);
        for &tokens in tokens {
            for HeadConfiguration { kv: kv_heads, dim: head_dim, .. } in [WIDE, NARROW] {
                self.op(OpSig::KvGather {
                    tokens,
                    wire: kv,
                    kv: KvShape { kv_heads, head_dim, page_tokens, dtype: kv, latent: None },
                });
                self.op(OpSig::KvScatter {
                    tokens,
                    wire: kv,
                    kv: KvShape { kv_heads, head_dim, page_tokens, dtype: kv, latent: None },
                });
            }
        }
    }

    /// Adds the products of a layer, and the logits, for the given numbers of rows.
    fn layer(&mut self, dtype: DType, rows: &[u32], family: &FamilyShapes) {
        let FamilyShapes { hidden, inner, kv, vocab } = *family;
        for &m in rows {
            for (n, k, acc) in
                [(hidden, hidden, false), (kv, hidden, false), (inner, hidden, false), (hidden, inner, true)]
            {
                self.op(gemm(dtype, m, n, k, acc, false));
            }
            // logits are needed for one row per sequence
            if m <= 64 {
                self.op(gemm(dtype, m, vocab, hidden, false, true));
            }
        }
    }

    /// Adds products. A kernel's time is a staircase over rows, where one row beyond a multiple of its tile
    /// costs a whole tile, so the row after a likely step is measured too.
    fn gemms(&mut self) {
        let rows: &[u32] = self.by_level(
            &[1, 8, 9, 64, 512],
            &[1, 2, 4, 8, 9, 16, 17, 24, 25, 32, 64, 128, 256, 512, 2048],
            &[
                1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 20, 24, 25, 28, 32, 33, 40, 48, 64, 65, 96, 128, 129,
                192, 256, 384, 512, 768, 1024, 2048, 4096, 8192,
            ],
        );
        let families = match self.level {
            ProfileLevel::Quick => &FAMILIES[..1],
            ProfileLevel::Default => &FAMILIES[..3],
            ProfileLevel::Full => &FAMILIES[..],
        };
        for family in families {
            self.layer(DType::Bf16, rows, family);
        }
        // peaks, and the residual stream's own shape at 4096
        let square: &[u32] = self.by_level(&[512], &[1, 512, 2048], &[1, 32, 512, 2048, 8192]);
        for &m in square {
            for dtype in [DType::Bf16, DType::F16, DType::F32, DType::F8E4m3] {
                self.op(gemm(dtype, m, 4096, 4096, false, false));
            }
        }
    }

    /// Adds the operations of a layer of small experts, fewer than in a model, so that they fit: time depends
    /// on how many of them have rows, and how many rows. Once with every touched expert at an even load, and
    /// once with the rows of four experts.
    fn experts(&mut self) {
        let (x, experts, active, inner, hidden) = (DType::Bf16, 32, 8, 768, 2048);
        let tokens =
            self.by_level(&[1, 32], &[1, 8, 64, 512], &[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048]);
        for &tokens in tokens {
            self.op(route(tokens, 128, active));
            self.op(OpSig::Combine { tokens, active, cols: hidden, x, accumulate: true });
            let choices = tokens * active;
            for touched in [experts.min(choices), 4] {
                let by = |fan| GroupedRows { choices, fan, experts, touched, others: 0 };
                self.op(grouped_gemm(x, by(active), inner, hidden));
                self.op(grouped_gemm(x, by(1), hidden, inner));
            }
        }
    }

    fn decode(&mut self, dtype: DType, heads: HeadConfiguration, batches: &[u32], contexts: &[u32]) {
        for &batch in batches {
            for &context in contexts {
                let sig = attn_decode(dtype, batch, context, heads, self.page_tokens);
                self.works.extend(sig.map(WorkItem::Op));
            }
        }
    }

    fn prefill(&mut self, dtype: DType, heads: HeadConfiguration, tokens: &[u32], before: &[u32]) {
        for &tokens in tokens {
            for &before in before {
                let sig = attn_prefill(dtype, tokens, before, heads, self.page_tokens);
                self.works.extend(sig.map(WorkItem::Op));
            }
        }
    }

    fn attention(&mut self) {
        let batches: &[u32] = self.by_level(&[1, 16], &[1, 4, 16, 64], &[1, 2, 4, 8, 16, 32, 64, 128]);
        let contexts: &[u32] = self.by_level(
            &[512, 4096],
            &[32, 128, 512, 2048, 8192, 32_768],
            &[16, 64, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536],
        );
        let tokens: &[u32] =
            self.by_level(&[512], &[32, 128, 512, 2048], &[16, 64, 256, 512, 1024, 2048, 8192]);
        let before: &[u32] =
            self.by_level(&[0, 2048], &[0, 512, 2048, 8192], &[0, 512, 1024, 2048, 8192, 32_768]);
        let x = DType::Bf16;
        for heads in [WIDE, NARROW] {
            self.decode(x, heads, batches, contexts);
            self.prefill(x, heads, tokens, before);
        }
        for ratio in [1, 8] {
            self.decode(x, HeadConfiguration { ratio, ..WIDE }, &[1, 16], &[2048]);
        }
        let contexts = self.by_level(&[2048], &[512, 2048, 8192], &[512, 2048, 8192, 32_768]);
        self.decode(x, LATENT, self.by_level(&[16], &[1, 16], &[1, 4, 16, 64]), contexts);
        self.decode(x, HeadConfiguration { ratio: 128, ..LATENT }, &[16], &[2048]);
        self.prefill(x, LATENT, self.by_level(&[], &[512], &[128, 512, 2048]), &[0, 2048]);
        self.decode(DType::F16, WIDE, &[16], &[2048]);
        self.decode(DType::F32, WIDE, &[16], &[2048]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_planned_work_has_a_name_that_leads_back_to_it() {
        for level in [ProfileLevel::Quick, ProfileLevel::Default, ProfileLevel::Full] {
            let works = plan(level, 32, &[], &[]);
            assert!(works.len() > 60, "{level:?}: {}", works.len());
            for work in &works {
                assert_eq!(WorkItem::parse(&work.id(), 32).as_ref(), Some(work), "{}", work.id());
            }
        }
    }

    #[test]
    fn patterns_choose_and_a_name_is_measured_even_if_no_level_has_it() {
        let only = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|w| (*w).to_owned()).collect();
            plan(ProfileLevel::Quick, 32, &[], &words).iter().map(WorkItem::id).collect::<Vec<_>>()
        };
        assert!(only(&["links"]).iter().all(|id| id.starts_with("copy_")));
        assert_eq!(only(&["gemm.bf16.m777.n11.k13"]), ["gemm.bf16.m777.n11.k13"]);
        assert!(only(&["no_such_thing"]).is_empty());
    }

    #[test]
    fn a_model_adds_its_own_operations() {
        let own = gemm(DType::Bf16, 512, 768, 2000, true, false);
        let standard = gemm(DType::Bf16, 512, 2048, 2048, false, false);
        let ids: Vec<String> =
            plan(ProfileLevel::Default, 32, &[own, standard], &[]).iter().map(WorkItem::id).collect();
        for id in ["gemm.bf16.m512.n768.k2000.acc", "gemm.bf16.m512.n2048.k2048"] {
            assert_eq!(ids.iter().filter(|known| *known == id).count(), 1, "{id}");
        }
    }
}
