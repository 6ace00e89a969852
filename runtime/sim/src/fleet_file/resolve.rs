//! Resolves the file as written to a fleet with all defaults.

use super::Routing;
use super::attending::AttendingHardware;
use super::cost::Hardware;
use super::error::suggestion;
use super::limits::TIER_TOKENS_MAX;
use super::spare::SpareHardware;
use super::{
    Engine, FleetFile, FleetFileError, FleetSources, InstancePool, Kv, Model, PoolLink, TierSize, VERSION,
    class, keeping, model, pipeline, raw, rebalance, slowdown,
};
use mixfleet_hal::cast::to_u64;
use mixfleet_hal::economics::Selection;
use mixfleet_hal::units::GB;
use mixfleet_scheduler::batch::BatchLimits;
use mixfleet_scheduler::cost::ModelShape;
use mixfleet_scheduler::engines::{self, KnownEngine};
use mixfleet_scheduler::sizing::MEMORY_SHARE;
use std::path::Path;

/// Default bandwidth of host memory: PCIe 4 with 16 lanes, if the device's own link is unknown.
pub(super) const DRAM_GB_PER_S: f64 = 32.0;
/// Default bandwidth of a disk: one NVMe disk on PCIe 4.
pub(super) const SSD_GB_PER_S: f64 = 5.0;

pub(super) fn wrong(place: impl Into<String>, cause: impl Into<String>) -> FleetFileError {
    FleetFileError::value(place, cause)
}

pub(super) fn file(
    raw: raw::File,
    directory: &Path,
    sources: FleetSources<'_>,
) -> Result<FleetFile, FleetFileError> {
    if raw.version != VERSION {
        return Err(wrong("version", format!("is {}; this program reads {VERSION}", raw.version)));
    }
    let model = model::resolve(&raw.model)?;
    let slo = raw.slo;
    positive("[slo] ttft_s", slo.ttft_s)?;
    positive("[slo] tbt_s", slo.tbt_s)?;
    if raw.pool.is_empty() {
        return Err(wrong("[[pool]]", "there is none; a fleet has at least one"));
    }
    let hardware: Vec<Hardware> =
        raw.pool.iter().map(|pool| Hardware::of(pool, directory, sources)).collect::<Result<_, _>>()?;
    let attending = raw.pool.iter().map(|pool| AttendingHardware::of(pool, directory, sources));
    let attending: Vec<Option<AttendingHardware>> = attending.collect::<Result<_, _>>()?;
    let spare = raw.pool.iter().map(|pool| SpareHardware::of(pool, &raw.pool, &hardware));
    let spare: Vec<Option<SpareHardware<'_>>> = spare.collect::<Result<_, _>>()?;
    let measured = hardware.iter().find_map(|hardware| hardware.engine()?.limits.block_tokens);
    let block_tokens = raw.kv.block_tokens.or(measured).unwrap_or(BatchLimits::BLOCK_TOKENS);
    at_least_one("[kv] block_tokens", block_tokens)?;
    let replicate_gb_per_s = raw.kv.replicate_gb_per_s;
    if let Some(rate) = replicate_gb_per_s {
        positive("[kv] replicate_gb_per_s", rate)?;
    }
    let kv = Kv { block_tokens, policy: raw.kv.policy, replicate_gb_per_s };
    let mut pools: Vec<InstancePool> = Vec::new();
    let devices = hardware.iter().zip(&attending).zip(&spare);
    for (pool, ((first, attending), spare)) in raw.pool.iter().zip(devices) {
        let place = format!("pool '{}'", pool.name);
        if pool.name.is_empty() || pools.iter().any(|other| other.name == pool.name) {
            return Err(wrong(place, "pools have names, and no two the same"));
        }
        pools.push(match pool.role.keeps() {
            true => keeping::pool(pool, &model, kv, &place)?,
            false => {
                let devices = PoolHardware { first, attending: attending.as_ref(), spare: spare.as_ref() };
                self::pool(pool, &devices, &raw.engine, &model, kv, &place)?
            }
        });
    }
    let rebalance = rebalance::resolve(raw.rebalance.as_ref(), &raw.pool)?;
    raw.link.iter().try_for_each(|link| check_link(link, &pools))?;
    let mut classes = Vec::new();
    for raw in raw.class {
        classes.push(class::resolve(raw, &slo, &classes)?);
    }
    raw.slowdown.iter().try_for_each(|slowdown| slowdown::check(slowdown, &pools))?;
    check_routers(raw.routers)?;
    let (links, slowdowns, routers) = (raw.link, raw.slowdown, raw.routers);
    Ok(FleetFile { model, slo, kv, pools, links, classes, rebalance, slowdowns, routers })
}

/// The devices of a pool's instances.
struct PoolHardware<'a> {
    /// Those with the weights.
    first: &'a Hardware,
    /// The attention devices.
    attending: Option<&'a AttendingHardware>,
    /// Devices of other instances that run attention for a part of the requests.
    spare: Option<&'a SpareHardware<'a>>,
}

#[expect(clippy::too_many_lines, reason = "one field of the file after the other")]
fn pool(
    raw: &raw::RawPool,
    &PoolHardware { first: hardware, attending, spare }: &PoolHardware<'_>,
    shared: &raw::Engine,
    model: &Model,
    kv: Kv,
    place: &str,
) -> Result<InstancePool, FleetFileError> {
    let key = |key: &str| format!("{place}: {key}");
    at_least_one(&key("count"), raw.count)?;
    if raw.usd_per_gib_hour.is_some() {
        return Err(wrong(key("usd_per_gib_hour"), "is for a pool of role \"kv\"; give usd_per_hour"));
    }
    at_least_one(&key("devices_per_instance"), raw.devices_per_instance)?;
    let model = &model::on_pool(model, raw).map_err(|(of, cause)| wrong(key(of), cause))?;
    let (key_of_name, name) = match &raw.engine {
        Some(name) => (key("engine"), Some(name)),
        None => ("[engine] name".into(), shared.name.as_ref()),
    };
    let known = match name {
        Some(name) => engines::find(name).map_err(|cause| wrong(key_of_name, cause))?,
        None => &engines::engines()[0],
    };
    let engine = engine(raw, shared, hardware, model, known);
    at_least_one(&key("max_batched_tokens"), engine.max_batched_tokens)?;
    let beside = engine.max_prefill_tokens_beside_decode.unwrap_or(1);
    at_least_one(&key("max_prefill_tokens_beside_decode"), beside)?;
    at_least_one(&key("max_sequences"), engine.max_sequences)?;
    let pipeline = pipeline::check(raw, model, engine)?;
    let nic_gb_per_s = raw.nic_gb_per_s.unwrap_or(InstancePool::NIC_GB_PER_S);
    positive(&key("nic_gb_per_s"), nic_gb_per_s)?;
    let tokens_max = engine.max_batched_tokens;
    let cost = match (attending, spare) {
        (Some(attending), _) => attending.cost(hardware, (raw, model), tokens_max, known, nic_gb_per_s),
        (None, Some(spare)) => spare.cost(hardware, (raw, model), tokens_max, known, nic_gb_per_s),
        (None, None) => hardware.cost(raw, model, tokens_max, known),
    };
    let (cost, cost_basis) = cost.map_err(|(name, cause)| wrong(key(name), cause))?;
    let (usd_per_hour, price_basis) = price(raw, hardware, attending, place)?;
    let price_stated = raw.usd_per_hour.is_some();
    let host_link = hardware.part.and_then(|part| part.host_link).map(|link| link.gb_s);
    let dram_gb_per_s = host_link.unwrap_or(DRAM_GB_PER_S) * raw.devices();
    let tier = |name: &str, tokens, bytes, gb_per_s: Option<f64>, usual| {
        let tokens = tokens_or_bytes(place, name, tokens, bytes, model)?.unwrap_or(0);
        let gb_per_s = gb_per_s.unwrap_or(usual);
        positive(&key(&format!("{name}_gb_per_s")), gb_per_s)?;
        Ok(TierSize { tokens, gb_per_s })
    };
    let (cost, cost_basis) = match pipeline {
        Some(pipeline) => pipeline.of(cost, &cost_basis, nic_gb_per_s),
        None => (cost, cost_basis),
    };
    // each side may be the one that a step waits for
    let others = attending.map(|attending| &attending.hardware).or(spare.map(SpareHardware::hardware));
    let errors = std::iter::once(hardware).chain(others);
    let errors = errors.map(|hardware| hardware.likely_error(raw, model, known));
    let likely_error = errors.collect::<Option<Vec<f64>>>().and_then(|all| all.into_iter().reduce(f64::max));
    Ok(InstancePool {
        name: raw.name.clone(),
        role: raw.role,
        count: raw.count,
        device: hardware.part.map(|part| part.id.to_owned()),
        own_device: hardware.own_selector(),
        devices_per_instance: raw.devices_per_instance,
        attention: attending.map(|attending| attending.devices(model)),
        spare: spare.map(SpareHardware::pool),
        pipeline_stages: raw.stages(),
        cost,
        cost_basis,
        kv_copies: match attending {
            Some(attending) => attending.kv_copies(),
            None => hardware.kv_copies(raw.devices_per_instance),
        },
        likely_error,
        usd_per_hour,
        price_basis,
        price_stated,
        cache_tokens: cache_tokens(
            raw,
            (hardware, attending),
            model,
            kv,
            (known, engine.max_sequences),
            place,
        )?,
        dram: tier("dram", raw.dram_tokens, raw.dram_bytes, raw.dram_gb_per_s, dram_gb_per_s)?,
        ssd: tier("ssd", raw.ssd_tokens, raw.ssd_bytes, raw.ssd_gb_per_s, SSD_GB_PER_S)?,
        nic_gb_per_s,
        engine,
    })
}

/// The engine's limits: the pool's, or else the file's, or else those of the measured engine.
fn engine(
    raw: &raw::RawPool,
    shared: &raw::Engine,
    hardware: &Hardware,
    model: &Model,
    known: &KnownEngine,
) -> Engine {
    let measured = hardware.engine().map(|engine| &engine.limits);
    let tokens = raw.max_batched_tokens.or(shared.max_batched_tokens);
    let beside = raw.max_prefill_tokens_beside_decode.or(shared.max_prefill_tokens_beside_decode);
    let sequences = raw.max_sequences.or(shared.max_sequences);
    let usual = || match &model.shape {
        Some(shape) => {
            let served = hardware.served_chunk(shape).filter(|_| !known.fills_steps);
            served.unwrap_or_else(|| known.step_tokens_on(hardware.part, shape))
        }
        None => known.step_tokens,
    };
    let max_batched_tokens =
        tokens.or(measured.and_then(|engine| engine.max_batched_tokens)).unwrap_or_else(usual);
    // Other engines fill a step up with prompts even beside decodes.
    let beside = beside.or((measured.is_some() || known.fills_steps).then_some(max_batched_tokens));
    Engine {
        max_batched_tokens,
        max_prefill_tokens_beside_decode: beside.map(|beside| beside.min(max_batched_tokens)),
        max_sequences: sequences
            .or(measured.and_then(|engine| engine.max_sequences))
            .unwrap_or(known.sequences),
    }
}

/// Tokens of KV that fit beside the weights, unless the file states them.
fn cache_tokens(
    raw: &raw::RawPool,
    (hardware, attending): (&Hardware, Option<&AttendingHardware>),
    model: &Model,
    kv: Kv,
    (known, sequences): (&KnownEngine, u32),
    place: &str,
) -> Result<u64, FleetFileError> {
    let devices = raw.devices();
    let states = model.shape.as_ref().map_or(0, ModelShape::state_bytes) as f64 * f64::from(sequences);
    let usable = hardware.usable_memory(known);
    let room = usable.map(|usable| devices * usable - model.weights.0 - states);
    let sizes = |memory_gb: f64| {
        let each = match usable {
            Some(usable) if known.cost.external => format!("{:.1} GB usable of {memory_gb:.0}", usable / GB),
            _ => format!("{memory_gb:.0} GB x {MEMORY_SHARE}"),
        };
        format!("{devices} x {each} for {:.1} GB of weights of {}", model.weights.0 / GB, model.name)
    };
    let memory_gb = hardware.memory().map_or(0.0, |memory| memory.0 / GB);
    if room.is_some_and(|room| room <= 0.0) {
        let cause = format!("the model does not fit: {}; take more or larger devices", sizes(memory_gb));
        return Err(wrong(format!("{place}: devices_per_instance"), cause));
    }
    let stated = tokens_or_bytes(place, "cache", raw.cache_tokens, raw.cache_bytes, model)?;
    let measured = hardware.engine().and_then(|engine| engine.limits.cache_tokens);
    let copies = model.shape.as_ref().map_or(1.0, |shape| shape.kv_copies(raw.devices_per_instance));
    let counted = match attending {
        Some(attending) => attending
            .kv_tokens(model, known)
            .map_err(|(key, cause)| wrong(format!("{place}: {key}"), cause))?,
        None => room.map(|room| room / (model.kv_bytes_per_token * copies)),
    };
    let counted = counted.map(to_u64);
    let tokens = stated.or(measured).or(counted).ok_or_else(|| {
        wrong(format!("{place}: cache_tokens"), "is missing, and without a device it cannot be counted")
    })?;
    if tokens < u64::from(kv.block_tokens) {
        let of = if stated.is_some() { String::new() } else { format!(" ({})", sizes(memory_gb)) };
        let cause = format!("{tokens} tokens of KV{of} are less than one block of {}", kv.block_tokens);
        return Err(wrong(format!("{place}: cache_tokens"), cause));
    }
    Ok(tokens)
}

fn price(
    raw: &raw::RawPool,
    hardware: &Hardware,
    attending: Option<&AttendingHardware>,
    place: &str,
) -> Result<(Option<f64>, String), FleetFileError> {
    if let Some(usd_per_hour) = raw.usd_per_hour {
        not_negative(&format!("{place}: usd_per_hour"), usd_per_hour)?;
        return Ok((Some(usd_per_hour), "stated in the fleet file".into()));
    }
    let price = |hardware: &Hardware| {
        hardware.part.and_then(|part| Selection::default().price_or_reference(part.id, &[]))
    };
    let of_all = std::iter::once((hardware, raw.devices()))
        .chain(attending.map(|attending| (&attending.hardware, f64::from(attending.count))))
        .map(|(hardware, devices)| {
            price(hardware).map(|price| (price.usd_per_hour.0 * devices, price.basis))
        });
    Ok(match of_all.collect::<Option<Vec<(f64, String)>>>() {
        Some(all) => {
            let (rents, bases): (Vec<f64>, Vec<String>) = all.into_iter().unzip();
            (Some(rents.iter().sum()), bases.join("; "))
        }
        None => (None, "no offer known".into()),
    })
}

pub(super) fn tokens_or_bytes(
    place: &str,
    name: &str,
    tokens: Option<u64>,
    bytes: Option<f64>,
    model: &Model,
) -> Result<Option<u64>, FleetFileError> {
    if tokens.is_some() && bytes.is_some() {
        return Err(wrong(place, format!("has {name}_tokens and {name}_bytes; give one of them")));
    }
    let key = format!("{place}: {name}_bytes");
    not_negative(&key, bytes.unwrap_or(0.0))?;
    let tokens = tokens.or(bytes.map(|bytes| to_u64(bytes / model.kv_bytes_per_token)));
    match tokens.filter(|tokens| *tokens > TIER_TOKENS_MAX) {
        Some(many) => Err(wrong(key, format!("{many} tokens of KV; it must be at most {TIER_TOKENS_MAX}"))),
        None => Ok(tokens),
    }
}

fn check_routers(routers: Routing) -> Result<(), FleetFileError> {
    let count = routers.count;
    at_least_one("[routers] count", count)?;
    if count > Routing::COUNT_MAX {
        let cause = format!("is {count}; it must be at most {}", Routing::COUNT_MAX);
        return Err(wrong("[routers] count", cause));
    }
    not_negative("[routers] delay_s", routers.delay_s)
}

fn check_link(link: &PoolLink, pools: &[InstancePool]) -> Result<(), FleetFileError> {
    let place = format!("link from '{}' to '{}'", link.from, link.to);
    for pattern in [&link.from, &link.to] {
        if !pools.iter().any(|pool| fits(pattern, &pool.name)) {
            let near = suggestion(pattern, pools.iter().map(|pool| pool.name.as_str()));
            return Err(wrong(place, format!("no pool is called '{pattern}'{near}")));
        }
    }
    if let Some(gb_per_s) = link.gb_per_s {
        positive(&format!("{place}: gb_per_s"), gb_per_s)?;
    }
    not_negative(&format!("{place}: latency_s"), link.latency_s)?;
    not_negative(&format!("{place}: usd_per_gb"), link.usd_per_gb)
}

/// Whether `name` matches `pattern`, in which `*` stands for any characters. Between two stars the leftmost
/// match leaves most for the rest, so backtracking is unnecessary.
pub(super) fn fits(pattern: &str, name: &str) -> bool {
    let mut pieces = pattern.split('*');
    let first = pieces.next().unwrap_or("");
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    let Some(last) = pieces.next_back() else { return rest.is_empty() };
    for piece in pieces {
        let Some((_, after)) = rest.split_once(piece) else { return false };
        rest = after;
    }
    rest.ends_with(last)
}

pub(super) fn positive(place: &str, value: f64) -> Result<(), FleetFileError> {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    Err(wrong(place, format!("is {value}; it must be a positive number")))
}

pub(super) fn not_negative(place: &str, value: f64) -> Result<(), FleetFileError> {
    if value.is_finite() && value >= 0.0 {
        return Ok(());
    }
    Err(wrong(place, format!("is {value}; it must be 0 or more")))
}

pub(super) fn at_least_one(place: &str, value: u32) -> Result<(), FleetFileError> {
    if value > 0 { Ok(()) } else { Err(wrong(place, "is 0; it must be at least 1")) }
}
