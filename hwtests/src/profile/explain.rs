//! Explains each number of a profile: what it means, how it is measured, what it decides, and what to expect.

mod words;

/// The explanation of one metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Name of the metric, which is also the first part of its points' names.
    pub name: &'static str,
    /// What it is.
    pub meaning: &'static str,
    /// How it is measured.
    pub method: &'static str,
    /// What depends on it.
    pub decides: &'static str,
    /// Typical values of good parts.
    pub typical: &'static str,
}

/// Returns the metric named at the beginning of `name`: `gemm`, or any point of it such as
/// `gemm.bf16.m1.n4096.k4096`.
pub fn explain(name: &str) -> Option<&'static Metric> {
    let first = name.split('.').next().unwrap_or(name);
    metrics().find(|metric| metric.name == first)
}

/// Returns every metric, group, flag and verdict.
pub fn metrics() -> impl Iterator<Item = &'static Metric> {
    [MEASURED, words::OPERATIONS, words::PARTS, words::FLAGS, words::OTHERS, words::SERVING]
        .into_iter()
        .flatten()
}

const MEASURED: &[Metric] = &[
    Metric {
        name: "gemm",
        meaning: "Time of out = x . weight^T: m rows (tokens) of x against n x k weights. `.acc` adds to the f32 \
                  residual stream, `.logits` writes f32.",
        method: "Commands in one batch, each with other weights over more bytes than the last-level cache holds; x \
                 and out stay in place, as between two layers. A few elements of the timed result are checked.",
        decides: "Prefill at large m, the weights' part of decoding at small m.",
        typical: "At m = 1 the weights stream at 80 to 95 % of memory_read; at m >= 512 good parts reach 60 to 85 % of \
                  the datasheet's dense rate.",
    },
    Metric {
        name: "grouped_gemm",
        meaning: "Time of r rows (choices of all tokens) through the matrices, of n x k, of their experts: `touched` \
                  of e experts have rows, each as many; `fan` rows in turn share a row of x.",
        method: "Like a matrix product. Once with all experts and once with four of them, for an even and a skewed load.",
        decides: "The MLP's part of a mixture of experts.",
        typical: "While few rows meet an expert, the touched weights stream like those of a plain product.",
    },
    Metric {
        name: "memory_read",
        meaning: "Bytes read per second over a working set that is touched over and over.",
        method: "A matrix product of one row (bf16, else f16, else f32): the plainest read that every backend has and \
                 cares for, since decoding consists of it. It writes almost nothing. A part whose product of one row \
                 is slow reads slower here than its memory could.",
        decides: "The roofline's slope; tokens per second of decoding.",
        typical: "80 to 93 % of the datasheet beyond the caches; several times that inside them.",
    },
    Metric {
        name: "memory_write",
        meaning: "Bytes written per second over a working set.",
        method: "Fill of the whole set.",
        decides: "Little in serving; a sanity check beside the read.",
        typical: "CPUs that read a line before they write it show half of the read; GPUs about the read.",
    },
    Metric {
        name: "memory_copy",
        meaning: "Bytes read plus bytes written per second, from one half of the working set to the other.",
        method: "Copy. Both directions are counted.",
        decides: "Moving KV inside a device; comparable with the STREAM copy figure.",
        typical: "70 to 90 % of the datasheet.",
    },
    Metric {
        name: "attn_decode",
        meaning: "Attention of one new token for each of b sequences with c tokens of context; gqa query heads share \
                  a KV head. 8 KV heads of 128 unless the name says otherwise.",
        method: "KV in pages in random order, other pools for each command; the rate counts KV bytes.",
        decides: "How the time between tokens grows with context and batch; whether attention should run elsewhere.",
        typical: "60 to 90 % of memory_read at long contexts; far less below a few thousand tokens in all.",
    },
    Metric {
        name: "attn_prefill",
        meaning: "Causal attention of t new tokens of one sequence after c tokens of context.",
        method: "As attn_decode; the rate counts visible pairs only.",
        decides: "How time to first token grows beyond proportion with the prompt.",
        typical: "40 to 75 % of the bf16 product rate on GPUs; less on CPUs.",
    },
    Metric {
        name: "copy_h2d",
        meaning: "Time to write host memory to the device.",
        method: "Device::write on the host's clock; ordinary (pageable) host memory, already touched. A line \
                 leads from each size to the next.",
        decides: "Loading weights, uploading a step's inputs, receiving KV through the host.",
        typical: "PCIe 4.0 x16: 20 to 25 GB/s; 5.0: 40 to 55 GB/s; pageable memory about half of that.",
    },
    Metric {
        name: "copy_d2h",
        meaning: "Time to read device memory into host memory.",
        method: "Device::read on the host's clock.",
        decides: "Fetching tokens or logits, sending KV through the host.",
        typical: "As copy_h2d.",
    },
    Metric {
        name: "copy_d2d",
        meaning: "Time to copy within the device, from memory that no cache holds.",
        method: "Copy; the rate counts both directions.",
        decides: "Compaction of KV.",
        typical: "As memory_copy at the largest sizes.",
    },
    Metric {
        name: "kv_gather",
        meaning: "Time to read t tokens' KV of one layer out of their pages into the wire layout.",
        method: "Whole pages in random order.",
        decides: "How fast KV can leave a prefill device.",
        typical: "50 to 90 % of memory_copy.",
    },
    Metric {
        name: "kv_scatter",
        meaning: "Time to write t tokens' KV of one layer from the wire layout into their pages.",
        method: "Whole pages in random order.",
        decides: "How fast KV can land on a decode device.",
        typical: "50 to 90 % of memory_copy.",
    },
    Metric {
        name: "kv_write",
        meaning: "Time to store t new tokens' keys and values in their pages.",
        method: "In the layer's own dtype.",
        decides: "A small part of every layer.",
        typical: "A few microseconds for a decode step.",
    },
    Metric {
        name: "launch",
        meaning: "What a batch costs on an idle queue beyond its work (`launch`), each command in it (`a command`), and one of a \
                  model's layer (`more in a layer`).",
        method: "Host time of batches of 0, 1 and 100 commands that do next to nothing, submitted and recorded. The \
                 device's own time for them is subtracted; the rest of every other point is without these costs. \
                 Dependence: a chain of norm, gate, up, activation, product, against the same commands alone; \
                 negative where the device joins some.",
        decides: "The floor of a decode step of a small model; whether recording pays.",
        typical: "CPUs: 5 to 20 us a batch; GPUs: 5 to 15 us a batch, 2 to 5 us a command, 1 us or less when replayed.",
    },
    Metric {
        name: "sustained",
        meaning: "Rate at the end of a long run over the rate at its beginning.",
        method: "One load without a pause: 2 s (quick), 15 s, or 120 s (full). The first tenth against the last third.",
        decides: "Whether short measurements hold under sustained load.",
        typical: "0.95 to 1 with good cooling; 0.7 to 0.9 on parts limited by power. Energy is given for 10 s and more.",
    },
    Metric {
        name: "ridge",
        meaning: "Rows at which a bf16 product turns from waiting for memory to waiting for arithmetic.",
        method: "Best bf16 product rate over memory_read: a weight is 2 bytes and 2 FLOP per row.",
        decides: "How many sequences a decode step can hold before it takes longer: the batch worth aiming for.",
        typical: "A 2-core CPU 10; L40S 350; H100 300; parts rich in bandwidth are lower.",
    },
    Metric {
        name: "per_dollar",
        meaning: "A rate divided by the rent: FLOP/s, bytes/s or bytes for each $/h.",
        method: "From --usd-per-hour; a price is an input with a date and a source, never a property of the part.",
        decides: "Where prefill and decode are placed.",
        typical: "The same part differs by 18 times between sellers; compare parts at prices that you can get.",
    },
    Metric {
        name: "cv",
        meaning: "Coefficient of variation: standard deviation over mean of a point's samples.",
        method: "Over the samples after the ramp.",
        decides: "The flag `noisy`.",
        typical: "Below 2 % on a quiet machine.",
    },
];

impl std::fmt::Display for Metric {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{}", self.name)?;
        for (label, text) in [
            ("meaning", self.meaning),
            ("measured", self.method),
            ("decides", self.decides),
            ("typical", self.typical),
        ] {
            writeln!(f, "  {label}\n    {text}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{Flag, PointGroup, ProfileLevel, plan};

    #[test]
    fn whatever_is_printed_is_explained() {
        let mut names: Vec<String> = PointGroup::ALL.iter().map(|group| group.name().to_owned()).collect();
        names.extend(Flag::ALL.iter().map(|flag| flag.name().to_owned()));
        names.extend(["attention", "drifted", "dependence_s", "capacity", "compute"].map(str::to_owned));
        names.extend(plan(ProfileLevel::Full, 32, &[], &[]).iter().map(|work| work.id()));
        for name in &names {
            assert!(explain(name).is_some(), "{name}");
        }
        assert_eq!(explain("rms_norm.bf16.t8.h4096").unwrap().name, "rms_norm");
        assert_eq!(explain("nonsense"), None);
    }

    #[test]
    fn each_word_has_one_text() {
        let mut seen = std::collections::HashSet::new();
        for metric in metrics() {
            assert!(seen.insert(metric.name), "{} twice", metric.name);
            assert_eq!(metric.to_string().lines().count(), 9, "{metric}");
        }
    }
}
