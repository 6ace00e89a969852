//! An instance of a planned pool, as arguments of a worker.

use crate::notation::Sharing;
use mixfleet_scheduler::cost::Lending;
use mixfleet_scheduler::plan::layouts::LayoutExperts;
use mixfleet_scheduler::plan::market::PlannedPool;
use mixfleet_scheduler::plan::offer::OfferedPart;
use mixfleet_sim::fleet_file::role_of;
use std::collections::BTreeMap;

/// The backend and the resource of Kubernetes for a vendor's parts.
pub(super) fn backend(vendor: &str) -> Option<(&'static str, &'static str)> {
    match vendor {
        "NVIDIA" => Some(("cuda", "nvidia.com/gpu")),
        "AMD" => Some(("wgpu", "amd.com/gpu")),
        "Intel" => Some(("wgpu", "gpu.intel.com/xe")),
        _ => None,
    }
}

/// Devices in a host, beyond which an instance has members in others.
pub(super) const HOST_DEVICES_MAX: u32 = 8;

/// An instance, as arguments of a worker.
#[derive(Clone, Debug)]
pub(super) struct WorkerDevice {
    /// As `--device` takes it.
    pub(super) selector: String,
    pub(super) usd_per_hour: f64,
    /// The instance's exclusive devices, in order.
    own: Vec<String>,
}

/// The next devices of a part, by its index and their number, as `--device` takes each.
pub(super) type TakeDevices<'a> = dyn FnMut(usize, u32) -> Result<Vec<String>, String> + 'a;

/// The devices of a part on a machine, numbered after those already `taken` of each backend.
///
/// # Errors
/// When no backend drives the part.
pub(super) fn on_machine(
    part: &OfferedPart,
    count: u32,
    taken: &mut BTreeMap<&'static str, u32>,
) -> Result<Vec<String>, String> {
    let (backend, _) = own_backend(part)?;
    let first = taken.entry(backend).or_default();
    *first += count;
    Ok((*first - count..*first).map(|number| format!("{backend}:{number}")).collect())
}

/// The backend and the resource of Kubernetes for a part.
///
/// # Errors
/// When there is none.
pub(super) fn own_backend(part: &OfferedPart) -> Result<(&'static str, &'static str), String> {
    let known = backend(part.part.vendor);
    known.ok_or_else(|| format!("mixfleet's own engine has no backend for {}", part.part.id))
}

/// The instances of some pools, by pool, each with the devices that `take` gives.
///
/// # Errors
/// Those of `take`, and layouts that the engine does not run.
pub(super) fn instances(
    parts: &[OfferedPart],
    pools: &[PlannedPool],
    take: &mut TakeDevices<'_>,
) -> Result<Vec<Vec<WorkerDevice>>, String> {
    let mut all: Vec<Vec<WorkerDevice>> = Vec::new();
    for pool in pools {
        let lender = pool.spare.and_then(|spare| spare.lender(pools));
        let mut of_pool = Vec::new();
        for number in 0..pool.count {
            let lent: Vec<String> = match lender {
                None => Vec::new(),
                Some(at) => {
                    let lending = Lending::of(pools[at].count, pool.count);
                    let lenders = lending.lenders_of(number);
                    // prefill pools come before decode pools
                    let known = all.get(at).ok_or("a lending pool comes after its borrower")?;
                    lenders.flat_map(|lender| known[lender as usize].own.clone()).collect()
                }
            };
            of_pool.push(instance(parts, pool, lent, take)?);
        }
        all.push(of_pool);
    }
    Ok(all)
}

/// An instance of a pool, with the `lent` devices that also run attention for it.
fn instance(
    parts: &[OfferedPart],
    pool: &PlannedPool,
    lent: Vec<String>,
    take: &mut TakeDevices<'_>,
) -> Result<WorkerDevice, String> {
    let PlannedPool { layout, attends, .. } = pool;
    let LayoutExperts::Divided(experts) = layout.experts else {
        return Err(
            "mixfleet's own engine divides no sequences by experts; its ep: divides experts alone".into()
        );
    };
    if (attends.is_some() || !lent.is_empty()) && layout.devices > 1 {
        return Err(
            "the products with weights are on one device of an instance whose attention has its own".into()
        );
    }
    let mut stages = Vec::new();
    for _ in 0..layout.stages {
        stages.push(take(pool.part, layout.per_stage())?);
    }
    let own = stages.concat();
    let joined_stages = stages.into_iter().map(|devices| joined(Sharing::of_layers(experts), devices));
    let parenthesised = |stage: String| if layout.per_stage() > 1 { format!("({stage})") } else { stage };
    let mut selector = match layout.stages {
        1 => joined_stages.collect(),
        _ => joined(Sharing::Stages, joined_stages.map(parenthesised).collect()),
    };
    if let Some(others) = attends {
        let all = [vec![selector], take(others.part, others.devices)?].concat();
        selector = joined(Sharing::Apart, all);
    } else if !lent.is_empty() {
        // the first has the weights and attends too
        selector = joined(Sharing::Apart, [vec![selector.clone(), selector], lent].concat());
    }
    let usd = |(part, devices): (usize, u32)| parts[part].usd_per_hour.0 * f64::from(devices);
    Ok(WorkerDevice { selector, usd_per_hour: pool.takes().map(usd).sum(), own })
}

/// Devices as one; one alone as it is.
fn joined(sharing: Sharing, devices: Vec<String>) -> String {
    match devices.len() {
        1 => devices.concat(),
        _ => format!("{}{}", sharing.word(), devices.join(",")),
    }
}

/// An argument of a shell command.
pub(super) fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,".contains(c);
    if word.chars().all(is_plain) { word.to_owned() } else { format!("'{word}'") }
}

/// A name for a pool, which tells it from others of its role and part by how their devices share the model.
pub(super) fn pool_name(parts: &[OfferedPart], pool: &PlannedPool) -> String {
    let name = format!("{}-{}", role_of(pool.duty), parts[pool.part].word());
    sharing_word(parts, pool).map_or_else(|| name.clone(), |word| format!("{name}-{word}"))
}

/// How devices of an instance share the model, in a word: `tp2`, `ep2`, `pp4`, `tp2-pp4`, `attn3-l4`, or
/// `experts8` where they divide sequences too.
pub(super) fn sharing_word(parts: &[OfferedPart], pool: &PlannedPool) -> Option<String> {
    let several = |sharing: Sharing, count: u32| {
        (count > 1).then(|| format!("{}{count}", sharing.word().trim_end_matches(':')))
    };
    let (layout, attends) = (pool.layout, pool.attends);
    let attends = attends.map(|others| {
        format!(
            "{}{}-{}",
            Sharing::Apart.word().trim_end_matches(':'),
            others.devices,
            parts[others.part].word()
        )
    });
    let per_stage = layout.per_stage();
    let divided = match layout.experts {
        LayoutExperts::Divided(experts) => several(Sharing::of_layers(experts), per_stage),
        LayoutExperts::WithSequences => Some(format!("experts{per_stage}")),
    };
    let words = [divided, several(Sharing::Stages, layout.stages), attends];
    let words: Vec<String> = words.into_iter().flatten().collect();
    (!words.is_empty()).then(|| words.join("-"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends;
    use crate::groups::SimGroup;
    use mixfleet_hal::catalog;
    use mixfleet_hal::units::UsdPerHour;
    use mixfleet_scheduler::plan::layouts::InstanceLayout;
    use mixfleet_scheduler::plan::market::{PlannedAttention, PlannedSpare};
    use mixfleet_scheduler::plan::program::Duty;

    fn parts() -> Vec<OfferedPart> {
        let offer = |name: &str, usd: f64| OfferedPart::new(catalog::part(name).unwrap(), UsdPerHour(usd));
        vec![offer("L40S", 1.5), offer("L4", 0.5), offer("MI300X", 3.0), offer("TPU-v5e", 1.0)]
    }

    fn pool(part: usize, layout: InstanceLayout, attends: Option<(usize, u32)>) -> PlannedPool {
        let attends = attends.map(|(part, devices)| PlannedAttention { part, devices });
        PlannedPool { part, layout, attends, spare: None, duty: Duty::Decode, count: 2 }
    }

    fn on_one_machine(pools: &[PlannedPool]) -> Result<Vec<Vec<WorkerDevice>>, String> {
        let (parts, mut taken) = (parts(), BTreeMap::new());
        instances(&parts, pools, &mut |part, count| on_machine(&parts[part], count, &mut taken))
    }

    fn stages(devices: u32, stages: u32) -> InstanceLayout {
        InstanceLayout { stages, ..InstanceLayout::of(devices) }
    }

    #[test]
    fn instances_are_written_as_the_program_reads_them() {
        let two_of = InstanceLayout::of(2);
        let one = InstanceLayout::of(1);
        for (pool, selectors, usd, name) in [
            (pool(0, one, None), ["cuda:0", "cuda:1"], 1.5, "decode-l40s"),
            (pool(0, two_of, None), ["tp:cuda:0,cuda:1", "tp:cuda:2,cuda:3"], 3.0, "decode-l40s-tp2"),
            (pool(1, stages(2, 2), None), ["pp:cuda:0,cuda:1", "pp:cuda:2,cuda:3"], 1.0, "decode-l4-pp2"),
            (
                pool(1, stages(4, 2), None),
                ["pp:(tp:cuda:0,cuda:1),(tp:cuda:2,cuda:3)", "pp:(tp:cuda:4,cuda:5),(tp:cuda:6,cuda:7)"],
                2.0,
                "decode-l4-tp2-pp2",
            ),
            (
                pool(0, two_of.by_member(), None),
                ["ep:cuda:0,cuda:1", "ep:cuda:2,cuda:3"],
                3.0,
                "decode-l40s-ep2",
            ),
            (
                pool(1, stages(4, 2).by_member(), None),
                ["pp:(ep:cuda:0,cuda:1),(ep:cuda:2,cuda:3)", "pp:(ep:cuda:4,cuda:5),(ep:cuda:6,cuda:7)"],
                2.0,
                "decode-l4-ep2-pp2",
            ),
            (
                pool(0, one, Some((1, 2))),
                ["attn:cuda:0,cuda:1,cuda:2", "attn:cuda:3,cuda:4,cuda:5"],
                2.5,
                "decode-l40s-attn2-l4",
            ),
            (
                pool(0, one, Some((2, 1))),
                ["attn:cuda:0,wgpu:0", "attn:cuda:1,wgpu:1"],
                4.5,
                "decode-l40s-attn1-mi300x",
            ),
        ] {
            let found = on_one_machine(std::slice::from_ref(&pool)).unwrap().remove(0);
            for (of, selector) in found.into_iter().zip(selectors) {
                assert_eq!((of.selector.as_str(), of.usd_per_hour), (selector, usd));
                let devices: u32 = pool.takes().map(|(_, devices)| devices).sum();
                let stages = backends::stages(selector).unwrap();
                assert_eq!(
                    (stages.len(), stages.concat().len()),
                    (pool.layout.stages as usize, devices as usize)
                );
                let simulated = selector.replace("cuda:", "sim:L4#").replace("wgpu:", "sim:L4#w");
                let group = SimGroup::of(&simulated).unwrap();
                assert_eq!(group.is_some(), devices > 1, "{simulated}");
            }
            assert_eq!(pool_name(&parts(), &pool), name);
        }
    }

    /// Two that decode have a third each of the only one that computes prompts; one alone has two of these.
    #[test]
    fn devices_that_compute_prompts_are_named_by_those_for_which_they_attend() {
        let one = InstanceLayout::of(1);
        let of = |counts: [u32; 2]| {
            let prompts = PlannedPool { duty: Duty::Prefill, count: counts[0], ..pool(0, one, None) };
            let spare = Some(PlannedSpare { part: 0, layout: one });
            let answers = PlannedPool { spare, count: counts[1], ..pool(1, one, None) };
            let found = on_one_machine(&[prompts, answers]).unwrap();
            found.concat().into_iter().map(|of| of.selector).collect::<Vec<_>>()
        };
        assert_eq!(of([1, 2]), ["cuda:0", "attn:cuda:1,cuda:1,cuda:0", "attn:cuda:2,cuda:2,cuda:0"]);
        assert_eq!(of([2, 1]), ["cuda:0", "cuda:1", "attn:cuda:2,cuda:2,cuda:0,cuda:1"]);
    }

    #[test]
    fn what_the_engine_does_not_run_is_refused_with_the_reason() {
        let says = |pool: PlannedPool, word: &str| {
            let why = on_one_machine(&[pool]).unwrap_err();
            assert!(why.contains(word), "{why}");
        };
        says(pool(0, InstanceLayout::of(2), Some((1, 1))), "one device of an instance");
        says(pool(0, InstanceLayout::of(8).with_sequences(), None), "by experts");
        says(pool(3, InstanceLayout::of(1), None), "no backend for TPU-v5e");
    }
}
