//! What can be measured, and the stable name of each: `gemm.bf16.m512.n4096.k4096`,
//! `attn_decode.bf16.b16.c16384.gqa4`, `memory_read.512MiB`.
//!
//! A name holds everything that decides a number but the device's own page size, so that two profiles
//! can be compared point by point and a vendor can claim a point. [`WorkItem::parse`] is the inverse of
//! [`WorkItem::id`]: any well-formed name can be measured, whether a level includes it or not.

use mixfleet_hal::profile::Traffic;
use mixfleet_hal::{
    DType, ExpertRouting, GroupedRows, KvShape, LatentKv, MatrixKind, OpSig, RotaryPart, Scalar,
};
use mixfleet_report::numbers::size;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A group of points; its names are the arguments of `--only`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "Group")]
pub enum PointGroup {
    /// Cost of a batch of commands beyond their work.
    Launch,
    /// Bandwidth by working set.
    Memory,
    /// Copies between host and device, and within the device.
    Links,
    /// Norms, RoPE, activation, embedding, draws, merge.
    Small,
    /// Writing KV pages, and moving them to and from the wire layout.
    Kv,
    /// Matrix products.
    Gemm,
    /// Mixtures of experts: choices, products by expert, and their sum.
    Experts,
    /// Attention of one new token per sequence.
    Decode,
    /// Attention of many new tokens.
    Prefill,
    /// Rates under sustained load.
    Sustained,
}

impl PointGroup {
    /// All groups, in the order in which they are measured.
    pub const ALL: [PointGroup; 10] = [
        PointGroup::Launch,
        PointGroup::Memory,
        PointGroup::Links,
        PointGroup::Small,
        PointGroup::Kv,
        PointGroup::Gemm,
        PointGroup::Experts,
        PointGroup::Decode,
        PointGroup::Prefill,
        PointGroup::Sustained,
    ];

    /// Returns the argument of `--only`.
    pub const fn name(self) -> &'static str {
        match self {
            PointGroup::Launch => "launch",
            PointGroup::Memory => "memory",
            PointGroup::Links => "links",
            PointGroup::Small => "small",
            PointGroup::Kv => "kv",
            PointGroup::Gemm => "gemm",
            PointGroup::Experts => "experts",
            PointGroup::Decode => "decode",
            PointGroup::Prefill => "prefill",
            PointGroup::Sustained => "sustained",
        }
    }
}

/// The commands that measure launch costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaunchCase {
    /// A batch of no commands.
    Empty,
    /// A batch of this many commands that do next to nothing.
    Commands(u32),
    /// The same commands, recorded beforehand.
    Replay(u32),
    /// A batch of this many commands of alternating kinds, each of which depends on the previous one.
    Chain(u32),
}

/// The work of a long run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SustainedLoad {
    /// A large matrix product.
    Gemm,
    /// Copies within memory.
    Stream,
}

/// One item to measure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WorkItem {
    /// An operation; in attention, all sequences have the same length.
    Op(OpSig),
    /// Bandwidth over a working set of this many bytes.
    Memory(Traffic, u64),
    /// `Device::write` of this many bytes.
    HostToDevice(u64),
    /// `Device::read` of this many bytes.
    DeviceToHost(u64),
    /// `Copy` of this many bytes that no cache holds.
    DeviceToDevice(u64),
    /// A launch without work.
    Launch(LaunchCase),
    /// A long run under load.
    Sustained(SustainedLoad),
}

/// Default number of KV heads, which names leave out.
const KV_HEADS: u32 = 8;
const HEAD_DIM: u32 = 128;
/// The `eps` of measured norms, which affects no cost.
const EPS: Scalar = Scalar(1e-6);

impl WorkItem {
    /// Returns the group it belongs to.
    pub fn group(&self) -> PointGroup {
        match self {
            WorkItem::Memory(..) => PointGroup::Memory,
            WorkItem::HostToDevice(_) | WorkItem::DeviceToHost(_) | WorkItem::DeviceToDevice(_) => {
                PointGroup::Links
            }
            WorkItem::Launch(_) => PointGroup::Launch,
            WorkItem::Sustained(_) => PointGroup::Sustained,
            WorkItem::Op(sig) => match sig {
                OpSig::Gemm { .. } | OpSig::QuantisedGemm { .. } => PointGroup::Gemm,
                OpSig::Route { .. } | OpSig::GroupedGemm { .. } | OpSig::Combine { .. } => {
                    PointGroup::Experts
                }
                OpSig::AttnDecode { .. } => PointGroup::Decode,
                OpSig::AttnPrefill { .. } => PointGroup::Prefill,
                OpSig::KvWrite { .. } | OpSig::KvGather { .. } | OpSig::KvScatter { .. } => PointGroup::Kv,
                _ => PointGroup::Small,
            },
        }
    }

    /// Returns its stable name.
    pub fn id(&self) -> String {
        match self {
            WorkItem::Op(sig) => op_id(sig),
            WorkItem::Memory(Traffic::Read, bytes) => format!("memory_read.{}", size(*bytes)),
            WorkItem::Memory(Traffic::Write, bytes) => format!("memory_write.{}", size(*bytes)),
            WorkItem::Memory(Traffic::Copy, bytes) => format!("memory_copy.{}", size(*bytes)),
            WorkItem::HostToDevice(bytes) => format!("copy_h2d.{}", size(*bytes)),
            WorkItem::DeviceToHost(bytes) => format!("copy_d2h.{}", size(*bytes)),
            WorkItem::DeviceToDevice(bytes) => format!("copy_d2d.{}", size(*bytes)),
            WorkItem::Launch(LaunchCase::Empty) => "launch.empty".to_owned(),
            WorkItem::Launch(LaunchCase::Commands(n)) => format!("launch.commands{n}"),
            WorkItem::Launch(LaunchCase::Replay(n)) => format!("launch.replay{n}"),
            WorkItem::Launch(LaunchCase::Chain(n)) => format!("launch.chain{n}"),
            WorkItem::Sustained(SustainedLoad::Gemm) => "sustained.gemm".to_owned(),
            WorkItem::Sustained(SustainedLoad::Stream) => "sustained.stream".to_owned(),
        }
    }

    /// Parses a name, for a device with pages of `page_tokens`; `None` if it is invalid.
    pub fn parse(id: &str, page_tokens: u32) -> Option<WorkItem> {
        let (kind, rest) = id.split_once('.')?;
        let bytes = || parse_size(rest);
        let work = match kind {
            "memory_read" => WorkItem::Memory(Traffic::Read, bytes()?),
            "memory_write" => WorkItem::Memory(Traffic::Write, bytes()?),
            "memory_copy" => WorkItem::Memory(Traffic::Copy, bytes()?),
            "copy_h2d" => WorkItem::HostToDevice(bytes()?),
            "copy_d2h" => WorkItem::DeviceToHost(bytes()?),
            "copy_d2d" => WorkItem::DeviceToDevice(bytes()?),
            "launch" => WorkItem::Launch(parse_launch(rest)?),
            "sustained" => WorkItem::Sustained(match rest {
                "gemm" => SustainedLoad::Gemm,
                "stream" => SustainedLoad::Stream,
                _ => return None,
            }),
            _ => WorkItem::Op(parse_op(kind, rest, page_tokens)?),
        };
        // only the canonical spelling is a name
        (work.id() == id).then_some(work)
    }
}

fn parse_launch(text: &str) -> Option<LaunchCase> {
    if text == "empty" {
        return Some(LaunchCase::Empty);
    }
    let (kind, count) = text.split_at(text.find(|c: char| c.is_ascii_digit())?);
    let count = count.parse().ok()?;
    match kind {
        "commands" => Some(LaunchCase::Commands(count)),
        "replay" => Some(LaunchCase::Replay(count)),
        "chain" => Some(LaunchCase::Chain(count)),
        _ => None,
    }
}

fn parse_size(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit())?;
    let shift = match &text[digits..] {
        "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        _ => return None,
    };
    let bytes = text[..digits].parse::<u64>().ok()?.checked_shl(shift)?;
    (bytes > 0 && bytes >> shift == text[..digits].parse::<u64>().ok()?).then_some(bytes)
}

/// Returns `.kv4.d64` and similar suffixes if they differ from the defaults.
fn heads_suffix(kv_heads: u32, head_dim: u32) -> String {
    let kv = if kv_heads == KV_HEADS { String::new() } else { format!(".kv{kv_heads}") };
    let dim = if head_dim == HEAD_DIM { String::new() } else { format!(".d{head_dim}") };
    kv + &dim
}

#[expect(clippy::too_many_lines, reason = "one arm for each kind of operation")]
fn op_id(sig: &OpSig) -> String {
    let name = sig.name();
    match *sig {
        OpSig::Gemm { m, n, k, x, out, accumulate, .. } => {
            let kind = match (accumulate, out == gemm_out(x)) {
                (true, _) => ".acc",
                (false, true) => "",
                (false, false) => ".logits",
            };
            format!("gemm.{x}.m{m}.n{n}.k{k}{kind}")
        }
        OpSig::AttnDecode {
            sequences,
            kv_tokens,
            heads,
            kv: KvShape { kv_heads, head_dim, dtype: kv, latent, .. },
            ..
        } => {
            let context = kv_tokens / u64::from(sequences.max(1));
            let suffix = heads_suffix(kv_heads, head_dim) + &values_suffix(latent);
            format!("{name}.{kv}.b{sequences}.c{context}.gqa{}{suffix}", heads / kv_heads.max(1))
        }
        OpSig::AttnPrefill {
            tokens,
            kv_tokens,
            heads,
            kv: KvShape { kv_heads, head_dim, dtype: kv, latent, .. },
            ..
        } => {
            let before = kv_tokens - u64::from(tokens);
            let suffix = heads_suffix(kv_heads, head_dim) + &values_suffix(latent);
            format!("{name}.{kv}.t{tokens}.c{before}.gqa{}{suffix}", heads / kv_heads.max(1))
        }
        OpSig::Embed { tokens, vocab, hidden, table, .. } => {
            format!("{name}.{table}.t{tokens}.v{vocab}.h{hidden}")
        }
        OpSig::QuantisedEmbed { tokens, vocab, hidden, table, .. } => {
            format!("{name}.{table}.t{tokens}.v{vocab}.h{hidden}")
        }
        OpSig::QuantisedGemm { m, n, k, x, weight, .. } => format!("{name}.{x}.{weight}.m{m}.n{n}.k{k}"),
        OpSig::RmsNorm { rows, cols, out, .. } => format!("{name}.{out}.t{rows}.h{cols}"),
        OpSig::Rope { tokens, heads, head_dim, part, x } => {
            let part = part.map_or(String::new(), |RotaryPart { first, length, interleaved }| {
                let pairs = if interleaved { ".neighbours" } else { "" };
                format!(".from{first}.rotated{length}{pairs}")
            });
            format!("{name}.{x}.t{tokens}.heads{heads}.d{head_dim}{part}")
        }
        OpSig::CopyColumns { rows, cols, from, to, x } => {
            format!("{name}.{x}.t{rows}.h{cols}.from{}of{}.to{}of{}", from.first, from.row, to.first, to.row)
        }
        OpSig::KvWrite { tokens, kv: KvShape { kv_heads, head_dim, dtype: kv, latent, .. }, .. }
        | OpSig::KvGather { tokens, kv: KvShape { kv_heads, head_dim, dtype: kv, latent, .. }, .. }
        | OpSig::KvScatter { tokens, kv: KvShape { kv_heads, head_dim, dtype: kv, latent, .. }, .. } => {
            format!("{name}.{kv}.t{tokens}.kv{kv_heads}.d{head_dim}{}", values_suffix(latent))
        }
        OpSig::AttnMerge { parts, rows, head_dim, out, .. } => {
            format!("{name}.{out}.p{parts}.t{rows}.d{head_dim}")
        }
        OpSig::SiluMul { elements, x }
        | OpSig::GeluMul { elements, x }
        | OpSig::Add { elements, x }
        | OpSig::ClampedSwiglu { elements, x, .. } => {
            format!("{name}.{x}.e{elements}")
        }
        OpSig::SoftCap { elements, .. } => format!("{name}.f32.e{elements}"),
        OpSig::Route { tokens, routing, .. } => {
            format!("{name}.f32.t{tokens}.e{}.a{}", routing.experts, routing.active)
        }
        OpSig::GroupedGemm {
            grouped: GroupedRows { choices, fan, experts, touched, others },
            n,
            k,
            x,
            weight,
            ..
        } => {
            let others = if others > 0 { format!(".others{others}") } else { String::new() };
            let weight = if weight == MatrixKind::Plain(x) { String::new() } else { format!(".{weight}") };
            format!("{name}.{x}{weight}.r{choices}.fan{fan}.e{experts}.touched{touched}{others}.n{n}.k{k}")
        }
        OpSig::Combine { tokens, active, cols, x, .. } => format!("{name}.{x}.t{tokens}.a{active}.h{cols}"),
        OpSig::Sample { rows, cols, .. } => format!("{name}.f32.t{rows}.v{cols}"),
        OpSig::Copy { bytes } | OpSig::Fill { bytes, .. } => format!("{name}.u32.e{}", bytes / 4),
    }
}

/// The length of values that keys contain.
fn values_suffix(latent: Option<LatentKv>) -> String {
    latent.map_or(String::new(), |latent| format!(".latent{}", latent.rank))
}

/// Returns the dtype of a product that stays an activation.
const fn gemm_out(x: DType) -> DType {
    if matches!(x, DType::F8E4m3) { DType::Bf16 } else { x }
}

/// The fields of a name, such as `m512`, taken one by one; leftover fields make the name invalid.
struct NameFields(BTreeMap<String, u64>);

impl NameFields {
    fn parse(text: &str) -> Option<NameFields> {
        let mut fields = BTreeMap::new();
        for field in text.split('.').filter(|f| !f.is_empty()) {
            let digits = field.find(|c: char| c.is_ascii_digit()).unwrap_or(field.len());
            let value: u64 = if digits == field.len() { 1 } else { field[digits..].parse().ok()? };
            // only a context may be 0
            if value == 0 && &field[..digits] != "c" {
                return None;
            }
            fields.insert(field[..digits].to_owned(), value);
        }
        Some(NameFields(fields))
    }

    fn long(&mut self, name: &str) -> Option<u64> {
        self.0.remove(name)
    }

    fn take(&mut self, name: &str) -> Option<u32> {
        self.long(name)?.try_into().ok()
    }
}

fn parse_op(kind: &str, rest: &str, page_tokens: u32) -> Option<OpSig> {
    let (dtype, rest) = rest.split_once('.')?;
    let dtype: DType = dtype.parse().ok()?;
    let mut f = NameFields::parse(rest)?;
    let sig = match kind {
        "gemm" => {
            let (m, n, k) = (f.take("m")?, f.take("n")?, f.take("k")?);
            let (accumulate, logits) = (f.take("acc").is_some(), f.take("logits").is_some());
            gemm(dtype, m, n, k, accumulate, logits)
        }
        "attn_decode" => {
            let (batch, context, ratio) = (f.take("b")?, f.take("c")?, f.take("gqa")?);
            let heads = HeadConfiguration::parse(ratio, &mut f);
            attn_decode(dtype, batch, context, heads, page_tokens)?
        }
        "attn_prefill" => {
            let (tokens, before, ratio) = (f.take("t")?, f.take("c")?, f.take("gqa")?);
            let heads = HeadConfiguration::parse(ratio, &mut f);
            attn_prefill(dtype, tokens, before, heads, page_tokens)?
        }
        "grouped_gemm" => {
            let (choices, fan, experts) = (f.take("r")?, f.take("fan")?, f.take("e")?);
            let touched = f.take("touched")?;
            let others = f.take("others").unwrap_or(0);
            let grouped = GroupedRows { choices, fan, experts, touched, others };
            grouped_gemm(dtype, grouped, f.take("n")?, f.take("k")?)
        }
        _ => small_op(kind, dtype, &mut f, page_tokens)?,
    };
    (f.0.is_empty() && sig.check().is_ok()).then_some(sig)
}

fn small_op(kind: &str, dtype: DType, f: &mut NameFields, page_tokens: u32) -> Option<OpSig> {
    let kv_op = |f: &mut NameFields| Some((f.take("t")?, f.take("kv")?, f.take("d")?));
    Some(match kind {
        "embed" => {
            let (tokens, vocab, hidden) = (f.take("t")?, f.take("v")?, f.take("h")?);
            OpSig::Embed { tokens, vocab, hidden, table: dtype, out: DType::F32 }
        }
        "rms_norm" => {
            let (rows, cols) = (f.take("t")?, f.take("h")?);
            OpSig::RmsNorm { rows, cols, eps: EPS, x: DType::F32, weight: dtype, out: dtype }
        }
        "rope" => OpSig::Rope {
            tokens: f.take("t")?,
            heads: f.take("heads")?,
            head_dim: f.take("d")?,
            part: None,
            x: dtype,
        },
        "kv_write" => {
            let (tokens, kv_heads, head_dim) = kv_op(f)?;
            OpSig::KvWrite {
                tokens,
                x: dtype,
                kv: KvShape { kv_heads, head_dim, page_tokens, dtype, latent: None },
            }
        }
        "kv_gather" => {
            let (tokens, kv_heads, head_dim) = kv_op(f)?;
            OpSig::KvGather {
                tokens,
                wire: dtype,
                kv: KvShape { kv_heads, head_dim, page_tokens, dtype, latent: None },
            }
        }
        "kv_scatter" => {
            let (tokens, kv_heads, head_dim) = kv_op(f)?;
            OpSig::KvScatter {
                tokens,
                wire: dtype,
                kv: KvShape { kv_heads, head_dim, page_tokens, dtype, latent: None },
            }
        }
        "attn_merge" => OpSig::AttnMerge {
            parts: f.take("p")?,
            rows: f.take("t")?,
            head_dim: f.take("d")?,
            sinks: 0,
            out: dtype,
        },
        "silu_mul" => OpSig::SiluMul { elements: f.long("e")?, x: dtype },
        "gelu_mul" => OpSig::GeluMul { elements: f.long("e")?, x: dtype },
        "add" => OpSig::Add { elements: f.long("e")?, x: dtype },
        "clamped_swiglu" => OpSig::ClampedSwiglu {
            elements: f.long("e")?,
            alpha: Scalar(1.702),
            limit: Scalar(7.0),
            x: dtype,
        },
        "soft_cap" => OpSig::SoftCap { elements: f.long("e")?, cap: Scalar(30.0) },
        "route" => route(f.take("t")?, f.take("e")?, f.take("a")?),
        "combine" => {
            let (tokens, active, cols) = (f.take("t")?, f.take("a")?, f.take("h")?);
            OpSig::Combine { tokens, active, cols, x: dtype, accumulate: true }
        }
        "sample" => OpSig::Sample { rows: f.take("t")?, cols: f.take("v")?, history: 0, tops: 0 },
        _ => return None,
    })
}

/// Returns a product as the engine runs it: activations of one dtype, accumulation into the f32 residual
/// stream, or f32 logits.
pub(crate) fn gemm(dtype: DType, m: u32, n: u32, k: u32, accumulate: bool, logits: bool) -> OpSig {
    let out = if accumulate || logits { DType::F32 } else { gemm_out(dtype) };
    OpSig::Gemm { m, n, k, x: dtype, weight: dtype, out, bias: false, accumulate }
}

/// Returns a product by experts as the engine runs it.
pub(crate) fn grouped_gemm(x: DType, grouped: GroupedRows, n: u32, k: u32) -> OpSig {
    OpSig::GroupedGemm { grouped, n, k, x, weight: MatrixKind::Plain(x), out: gemm_out(x), bias: false }
}

/// Returns the choice of `active` of `experts` for each of `tokens`.
pub(crate) fn route(tokens: u32, experts: u32, active: u32) -> OpSig {
    OpSig::Route { tokens, bias: false, routing: ExpertRouting::softmax(experts, active, true) }
}

/// Head configuration of an attention operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeadConfiguration {
    /// Query heads per KV head.
    pub(crate) ratio: u32,
    /// Number of KV heads.
    pub(crate) kv: u32,
    /// Length of a head.
    pub(crate) dim: u32,
    /// Length of the values that keys contain, if they do.
    pub(crate) rank: Option<u32>,
}

impl HeadConfiguration {
    fn parse(ratio: u32, f: &mut NameFields) -> HeadConfiguration {
        let (kv, dim) = (f.take("kv").unwrap_or(KV_HEADS), f.take("d").unwrap_or(HEAD_DIM));
        HeadConfiguration { ratio, kv, dim, rank: f.take("latent") }
    }

    /// Pages with their keys and values.
    fn pages(self, page_tokens: u32, dtype: DType) -> KvShape {
        // no time depends on what scores are multiplied by
        let latent = self.rank.map(|rank| LatentKv { rank, scale: Scalar(0.1) });
        KvShape { kv_heads: self.kv, head_dim: self.dim, page_tokens, dtype, latent }
    }
}

/// Returns decode attention over `batch` sequences of `context` tokens; `None` on overflow.
pub(crate) fn attn_decode(
    dtype: DType,
    batch: u32,
    context: u32,
    heads: HeadConfiguration,
    page_tokens: u32,
) -> Option<OpSig> {
    Some(OpSig::AttnDecode {
        sequences: batch,
        kv_tokens: u64::from(batch) * u64::from(context),
        heads: heads.ratio.checked_mul(heads.kv)?,
        pages_max: context.div_ceil(page_tokens.max(1)),
        x: dtype,
        kv: heads.pages(page_tokens, dtype),
        cap: None,
    })
}

/// Returns prefill attention of `tokens` new tokens of one sequence after `before`.
pub(crate) fn attn_prefill(
    dtype: DType,
    tokens: u32,
    before: u32,
    heads: HeadConfiguration,
    page_tokens: u32,
) -> Option<OpSig> {
    let context = tokens.checked_add(before)?;
    let new = u64::from(tokens);
    Some(OpSig::AttnPrefill {
        tokens,
        sequences: 1,
        pairs: new * u64::from(before) + new * (new + 1) / 2,
        kv_tokens: u64::from(context),
        heads: heads.ratio.checked_mul(heads.kv)?,
        pages_max: context.div_ceil(page_tokens.max(1)),
        window: None,
        sinks: false,
        x: dtype,
        kv: heads.pages(page_tokens, dtype),
        cap: None,
    })
}

/// Whether `pattern` selects `work`: by the name of its group (`attention` means decode and prefill), or by
/// its own name with `*` as a wildcard.
pub fn matches(pattern: &str, work: &WorkItem) -> bool {
    pattern == work.group().name()
        || (pattern == "attention" && matches!(work.group(), PointGroup::Decode | PointGroup::Prefill))
        || glob(pattern, &work.id())
}

/// Matches each piece between two stars at its first occurrence, which is never worse than a later one.
fn glob(pattern: &str, text: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(mut text) = text.strip_prefix(first) else { return false };
    let (middle, last) = rest.rsplit_once('*').map_or(("", rest), |(middle, last)| (middle, last));
    for piece in middle.split('*') {
        let Some(at) = text.find(piece) else { return false };
        text = &text[at + piece.len()..];
    }
    text.ends_with(last)
}

#[cfg(test)]
#[path = "work_tests.rs"]
mod tests;
