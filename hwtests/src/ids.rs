//! Ids of conformance cases, which are short, stable and unique.

use crate::cases::{Case, TokenSpread};
use crate::suite::SuiteEntry;
use mixfleet_hal::{ExpertRouting, KvShape, OpSig, RotaryPart, Scalar, Scoring};
use std::collections::HashMap;

/// Returns the entries with their ids, which begin with `l1.`. Cases that differ only in their seed are
/// distinguished by `.again2`, `.again3`.
pub(crate) fn with_ids(entries: Vec<SuiteEntry>) -> Vec<(String, SuiteEntry)> {
    let mut seen: HashMap<String, u32> = HashMap::new();
    let named = entries.into_iter().map(|entry| {
        let id = match &entry.case {
            Some(case) => format!("l1.{}", of(case)),
            None => format!("l1.{}", entry.name),
        };
        let count = seen.entry(id.clone()).or_default();
        *count += 1;
        if *count > 1 { (format!("{id}.again{count}"), entry) } else { (id, entry) }
    });
    named.collect()
}

/// Pages and what they hold.
fn pages(KvShape { kv_heads, head_dim, page_tokens, latent, .. }: KvShape) -> String {
    let values = latent.map_or(String::new(), |latent| format!(".latent{}", latent.rank));
    format!("kv{kv_heads}.d{head_dim}.p{page_tokens}{values}")
}

/// Returns the operation, its dtypes in the order of the signature, then the shape.
#[expect(clippy::too_many_lines, reason = "one arm for each kind of operation")]
pub(crate) fn of(case: &Case) -> String {
    let name = case.sig.name();
    let shape = match case.sig {
        OpSig::Embed { tokens, vocab, hidden, table, out } => {
            format!("{table}.{out}.t{tokens}.v{vocab}.h{hidden}")
        }
        OpSig::RmsNorm { rows, cols, eps, x, weight, out } => {
            format!("{x}.{weight}.{out}.r{rows}.c{cols}.eps{:e}", eps.0)
        }
        OpSig::Gemm { m, n, k, x, weight, out, bias, accumulate } => {
            let bias = if bias { ".bias" } else { "" };
            let accumulate = if accumulate { ".accumulate" } else { "" };
            format!("{x}.{weight}.{out}.m{m}.n{n}.k{k}{bias}{accumulate}")
        }
        OpSig::QuantisedEmbed { tokens, vocab, hidden, table, out } => {
            format!("{table}.{out}.t{tokens}.v{vocab}.h{hidden}")
        }
        OpSig::QuantisedGemm { m, n, k, x, weight, out, bias, accumulate } => {
            let bias = if bias { ".bias" } else { "" };
            let accumulate = if accumulate { ".accumulate" } else { "" };
            format!("{x}.{weight}.{out}.m{m}.n{n}.k{k}{bias}{accumulate}")
        }
        OpSig::Rope { tokens, heads, head_dim, part, x } => {
            let part = part.map_or(String::new(), |RotaryPart { first, length, interleaved }| {
                let pairs = if interleaved { ".neighbours" } else { "" };
                format!(".from{first}.rotated{length}{pairs}")
            });
            format!("{x}.t{tokens}.h{heads}.d{head_dim}{part}")
        }
        OpSig::CopyColumns { rows, cols, from, to, x } => {
            format!("{x}.r{rows}.c{cols}.from{}of{}.to{}of{}", from.first, from.row, to.first, to.row)
        }
        OpSig::KvWrite { tokens, x: other, kv }
        | OpSig::KvGather { tokens, wire: other, kv }
        | OpSig::KvScatter { tokens, wire: other, kv } => {
            format!("{other}.{}.t{tokens}.{}", kv.dtype, pages(kv))
        }
        OpSig::AttnPrefill { heads, window, sinks, cap, x, kv, .. } => {
            let window = window.map(|w| format!(".w{w}")).unwrap_or_default();
            let sinks = if sinks { ".sinks" } else { "" };
            let (dtype, pages) = (kv.dtype, pages(kv));
            format!("{x}.{dtype}.h{heads}.{pages}{window}{sinks}{}.{}", cap_suffix(cap), spread(&case.spread))
        }
        OpSig::AttnDecode { heads, cap, x, kv, .. } => {
            format!("{x}.{}.h{heads}.{}{}.{}", kv.dtype, pages(kv), cap_suffix(cap), spread(&case.spread))
        }
        OpSig::AttnMerge { parts, rows, head_dim, sinks, out } => {
            let sinks = if sinks > 0 { format!(".sinks{sinks}") } else { String::new() };
            format!("{out}.parts{parts}.r{rows}.d{head_dim}{sinks}")
        }
        OpSig::SiluMul { elements, x } | OpSig::GeluMul { elements, x } | OpSig::Add { elements, x } => {
            format!("{x}.n{elements}")
        }
        OpSig::Sample { rows, cols, history, tops } => {
            let history = if history > 0 { format!(".history{history}") } else { String::new() };
            let tops = if tops > 0 { format!(".top{tops}") } else { String::new() };
            format!("r{rows}.c{cols}{history}{tops}")
        }
        OpSig::ClampedSwiglu { elements, alpha, limit, x } => {
            format!("{x}.n{elements}.alpha{}.limit{}", alpha.0, limit.0)
        }
        OpSig::SoftCap { elements, cap } => format!("n{elements}{}", cap_suffix(Some(cap))),
        OpSig::Route { tokens, bias, routing } => {
            let ExpertRouting { experts, active, groups, groups_active, group_best, .. } = routing;
            let scoring = match routing.scoring {
                Scoring::Softmax => "softmax",
                Scoring::Sigmoid => "sigmoid",
            };
            let groups =
                if groups > 1 { format!(".g{groups}-{groups_active}-{group_best}") } else { String::new() };
            let bias = if bias { ".bias" } else { "" };
            let normalise = if routing.normalise { ".normalise" } else { "" };
            let scale = if routing.scale.0 == 1.0 { String::new() } else { format!(".x{}", routing.scale.0) };
            format!("{scoring}.t{tokens}.e{experts}.a{active}{groups}{bias}{normalise}{scale}")
        }
        OpSig::GroupedGemm { grouped, n, k, x, weight, out, bias } => {
            let bias = if bias { ".bias" } else { "" };
            let share = if grouped.others > 0 { ".share" } else { "" };
            format!("{x}.{weight}.{out}.f{}.n{n}.k{k}{bias}{share}.{}", grouped.fan, spread(&case.spread))
        }
        OpSig::Combine { tokens, active, cols, x, accumulate } => {
            let accumulate = if accumulate { ".accumulate" } else { "" };
            format!("{x}.t{tokens}.a{active}.c{cols}{accumulate}")
        }
        OpSig::Copy { bytes } => format!("b{bytes}"),
        OpSig::Fill { bytes, word } => format!("b{bytes}.w{word:x}"),
    };
    format!("{name}.{shape}")
}

fn cap_suffix(cap: Option<Scalar>) -> String {
    cap.map_or(String::new(), |cap| format!(".cap{}", cap.0))
}

/// Formats sequences as `first-second`, joined by `_`, counting equal ones.
fn spread(spread: &TokenSpread) -> String {
    let each: Vec<String> = match spread {
        TokenSpread::Even => return "even".to_owned(),
        TokenSpread::Queries(pairs) | TokenSpread::Ranges(pairs) => {
            pairs.iter().map(|(a, b)| format!("{a}-{b}")).collect()
        }
        TokenSpread::Experts(rows) | TokenSpread::ExpertShare(rows) => {
            rows.iter().map(u32::to_string).collect()
        }
    };
    let mut words: Vec<(String, u32)> = Vec::new();
    for word in each {
        match words.last_mut() {
            Some((last, count)) if *last == word => *count += 1,
            _ => words.push((word, 1)),
        }
    }
    let word = |(word, count): (String, u32)| if count > 1 { format!("{word}x{count}") } else { word };
    words.into_iter().map(word).collect::<Vec<_>>().join("_")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::ReferenceDevice;
    use crate::{SuiteLevel, entries};
    use mixfleet_hal::Device;
    use std::collections::HashSet;

    #[test]
    fn ids_are_unique_and_need_their_seed_rarely() {
        let limits = ReferenceDevice::default().limits();
        for level in [SuiteLevel::Quick, SuiteLevel::Full] {
            let named = with_ids(entries(level, &limits));
            let ids: HashSet<&String> = named.iter().map(|(id, _)| id).collect();
            assert_eq!(ids.len(), named.len());
            let again = ids.iter().filter(|id| id.contains(".again")).count();
            assert!(again * 20 < ids.len(), "{again} of {}", ids.len());
        }
        let named = with_ids(entries(SuiteLevel::Quick, &limits));
        assert!(named.iter().any(|(id, _)| id == "l1.gemm.f32.f32.f32.m1.n35.k70.bias.accumulate"));
    }
}
