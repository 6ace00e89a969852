//! Derives the time of steps from a pool's device, profile or calibration.

use super::model::INLINE;
use super::own::{OwnCalibration, OwnDevice};
use super::{FleetFileError, FleetSources, Model, attending, raw};
use crate::engine_profile::{EngineProfile, TableDirectory};
use mixfleet_hal::catalog::{self, Part, PartKind};
use mixfleet_hal::profile::{DeviceProfile, EvidenceBasis};
use mixfleet_hal::units::{Bytes, Seconds};
use mixfleet_scheduler::cost::{
    AllReduce, Coefficients, CostModel, DEVICES_MAX, DecodeCoefficients, Interconnect, KvCopyCost,
    ModelShape, PrefillCoefficients, ProfileCost,
};
use mixfleet_scheduler::engines::KnownEngine;
use mixfleet_scheduler::sizing::usable_bytes;
use std::path::Path;
use std::sync::Arc;

/// The key that is invalid, and why.
pub(super) type Refusal = (&'static str, String);

/// The known properties of a pool's devices.
pub(super) struct Hardware {
    pub(super) part: Option<&'static Part>,
    source: Source,
}

/// The origin of times.
enum Source {
    Engine(Box<EngineProfile>),
    Device(Box<DeviceSource>),
    /// A device of this machine, with the profile of its part, if it is known.
    Own {
        device: Box<OwnDevice>,
        part: Option<Box<DeviceSource>>,
    },
    /// A calibration alone.
    Nothing,
}

/// The times of a device's operations, and their origin.
struct DeviceSource {
    profile: DeviceProfile,
    basis: String,
}

impl Hardware {
    /// The devices of a pool: of one with attention apart those with the weights.
    pub(super) fn of(
        pool: &raw::RawPool,
        directory: &Path,
        sources: FleetSources<'_>,
    ) -> Result<Self, FleetFileError> {
        if pool.role.keeps() {
            return Ok(Hardware { part: None, source: Source::Nothing });
        }
        let device = match attending::names(pool)? {
            Some([first, _]) => Some(first),
            None => pool.device.as_deref(),
        };
        Hardware::named(pool, device, directory, sources)
    }

    /// What `device`, a name in the file, is.
    pub(super) fn named(
        pool: &raw::RawPool,
        device: Option<&str>,
        directory: &Path,
        sources: FleetSources<'_>,
    ) -> Result<Self, FleetFileError> {
        let wrong =
            |key: &str, cause: String| FleetFileError::value(format!("pool '{}': {key}", pool.name), cause);
        let unknown =
            |id: &str, why: &str| wrong("device", format!("'{id}' is no device of this machine, and {why}"));
        let mut own = None;
        let mut find = |id: &str| {
            if let Some(part) = catalog::part(id) {
                return Ok(Some(part));
            }
            own = (sources.device)(id).map_err(|cause| wrong("device", cause))?;
            match own.as_ref() {
                Some(own) => Ok(own.part),
                None => catalog::named(id).map(Some).map_err(|why| unknown(id, &why)),
            }
        };
        // A device is a part of the catalog, or the file of a measured one.
        let (device, profile) = match device {
            Some(file) if Path::new(file).extension().is_some_and(|end| end.eq_ignore_ascii_case("json")) => {
                if pool.profile.is_some() {
                    return Err(wrong(
                        "profile",
                        format!("cannot be combined with device = \"{file}\"; give one of them"),
                    ));
                }
                (None, Some(("device", file)))
            }
            device => (device, pool.profile.as_deref().map(|file| ("profile", file))),
        };
        let mut part = device.map(&mut find).transpose()?.flatten();
        let source = match profile {
            Some((key, file)) => {
                let path = directory.join(file);
                let refused = |cause| wrong(key, cause);
                if let Some(read) = engine_profile(&path, pool.devices_per_instance).map_err(refused)? {
                    part = part.or_else(|| catalog::part_of_driver(&read.device));
                    Source::Engine(Box::new(read))
                } else {
                    let profile = (sources.profile)(&path).map_err(refused)?;
                    part = part.or_else(|| catalog::part_of_driver(&profile.name));
                    Source::Device(Box::new(DeviceSource { profile, basis: format!("profile {file}") }))
                }
            }
            None => match own {
                Some(device) => {
                    Source::Own { device: Box::new(device), part: part.map(datasheet).map(Box::new) }
                }
                None => part.map_or(Source::Nothing, |part| Source::Device(Box::new(datasheet(part)))),
            },
        };
        if matches!(source, Source::Nothing) && pool.calibration.is_none() {
            return Err(wrong("device", "is missing; give it, a profile, or a calibration".into()));
        }
        Ok(Hardware { part, source })
    }

    /// The likely relative error of predictions; `None` for measured or stated times.
    pub(super) fn likely_error(
        &self,
        pool: &raw::RawPool,
        model: &Model,
        engine: &KnownEngine,
    ) -> Option<f64> {
        let shape = model.shape.as_ref().filter(|_| pool.calibration.is_none())?;
        if self.measured_steps(pool, shape).is_some() {
            return None;
        }
        self.profile().and_then(|(profile, _)| engine.likely_error(profile, shape))
    }

    /// The selector of a device of this machine.
    pub(super) fn own_selector(&self) -> Option<String> {
        match &self.source {
            Source::Own { device, .. } => Some(device.selector.clone()),
            _ => None,
        }
    }

    /// Prompt tokens of a step that serving chose for a device of this machine.
    pub(super) fn served_chunk(&self, shape: &ModelShape) -> Option<u32> {
        match &self.source {
            Source::Own { device, .. } => Some(device.calibration(shape)?.steps.chunk_tokens),
            _ => None,
        }
    }

    /// The calibration of a device of this machine that makes up an instance.
    fn measured_steps(
        &self,
        pool: &raw::RawPool,
        shape: &ModelShape,
    ) -> Option<(&OwnDevice, &OwnCalibration)> {
        match &self.source {
            Source::Own { device, .. } if pool.devices_per_instance == 1 => {
                Some((&**device, device.calibration(shape)?))
            }
            _ => None,
        }
    }

    /// The serving engine that was measured, if one was.
    pub(super) fn engine(&self) -> Option<&EngineProfile> {
        match &self.source {
            Source::Engine(engine) => Some(engine),
            _ => None,
        }
    }

    /// The profile of a device and its origin, if that is what times come from.
    pub(super) fn profile(&self) -> Option<(&DeviceProfile, &str)> {
        match &self.source {
            Source::Device(known) => Some((&known.profile, &known.basis)),
            Source::Own { part: Some(known), .. } => Some((&known.profile, &known.basis)),
            _ => None,
        }
    }

    /// Memory of one device, if known.
    pub(super) fn memory(&self) -> Option<Bytes> {
        match &self.source {
            Source::Device(known) => Some(known.profile.memory),
            Source::Own { device, .. } => Some(device.memory),
            _ => self.part.map(Part::memory_bytes),
        }
    }

    /// Bytes of one device that weights and KV may fill, if known. Measured memory is not a catalog's.
    pub(super) fn usable_memory(&self, engine: &KnownEngine) -> Option<f64> {
        let is_stated = matches!(&self.source, Source::Device(known) if catalog::is_claim(&known.profile));
        Some(usable_bytes(self.memory()?, is_stated && engine.cost.external))
    }

    /// What copies of KV take from the steps of an instance whose KV is divided over `devices`. Processors
    /// copy between steps, all other parts beside them.
    pub(super) fn kv_copies(&self, devices: u32) -> KvCopyCost {
        let known = match &self.source {
            Source::Device(known) => Some(known.profile.clone()),
            // as in serving, calibration measures steps alone
            Source::Own { .. } => None,
            _ => self.part.map(Part::profile),
        };
        let is_processor = |profile: &DeviceProfile| match self.part {
            Some(part) => part.kind == PartKind::Cpu,
            None => profile.fingerprint.starts_with("cpu "),
        };
        let cost = known.map(|profile| match is_processor(&profile) {
            true => KvCopyCost::between(&profile),
            false => KvCopyCost::beside(&profile),
        });
        cost.unwrap_or_default().shared_by(devices)
    }

    /// The cost model of an instance, and its origin.
    ///
    /// # Errors
    /// A [`Refusal`].
    pub(super) fn cost(
        &self,
        pool: &raw::RawPool,
        model: &Model,
        chunk_tokens: u32,
        engine: &KnownEngine,
    ) -> Result<(CostModel, String), Refusal> {
        let Some(calibration) = pool.calibration else {
            return self.predicted(pool, model, chunk_tokens, engine);
        };
        check(&calibration)?;
        if let raw::Calibration { prefill_s: Some(prefill_s), decode_s: Some(decode_s) } = calibration {
            return Ok((CostModel::Coefficients(Coefficients { prefill_s, decode_s }), "calibration".into()));
        }
        let missing = if calibration.prefill_s.is_none() { "prefill_s" } else { "decode_s" };
        if matches!(self.source, Source::Nothing) {
            return Err((
                "calibration",
                format!("lacks {missing}, and there is no device or profile to take it from"),
            ));
        }
        let (rest, basis) = self.predicted(pool, model, chunk_tokens, engine)?;
        let fitted = fit(&rest);
        let cost = Coefficients {
            prefill_s: calibration.prefill_s.unwrap_or(fitted.prefill_s),
            decode_s: calibration.decode_s.unwrap_or(fitted.decode_s),
        };
        Ok((CostModel::Coefficients(cost), format!("calibration; {missing} fitted to {basis}")))
    }

    fn predicted(
        &self,
        pool: &raw::RawPool,
        model: &Model,
        chunk_tokens: u32,
        known: &KnownEngine,
    ) -> Result<(CostModel, String), Refusal> {
        let devices = pool.devices_per_instance;
        let all_reduce = self.all_reduce(pool)?;
        match &self.source {
            Source::Engine(engine) => of_engine(engine, devices, model, chunk_tokens, all_reduce),
            Source::Device(_) => self.by_operations(pool, model, chunk_tokens, known),
            Source::Own { device, part } => {
                let steps = model.shape.as_ref().and_then(|shape| self.measured_steps(pool, shape));
                match (steps, part) {
                    (Some((device, measured)), None) => Ok(device.predicted(measured, None)),
                    (Some((device, measured)), Some(_)) => {
                        let (base, _) = self.by_operations(pool, model, chunk_tokens, known)?;
                        Ok(device.predicted(measured, self.part.map(|part| (part, base))))
                    }
                    (None, Some(_)) => {
                        let (cost, basis) = self.by_operations(pool, model, chunk_tokens, known)?;
                        Ok((cost, format!("{basis}; {}", device.lacks(&model.name, devices))))
                    }
                    (None, None) => Err(("device", device.lacks(&model.name, devices))),
                }
            }
            Source::Nothing => Err(("device", "is missing; give it, a profile, or a calibration".into())),
        }
    }

    /// The cost model of an instance by the times of operations, and its origin.
    fn by_operations(
        &self,
        pool: &raw::RawPool,
        model: &Model,
        chunk_tokens: u32,
        known: &KnownEngine,
    ) -> Result<(CostModel, String), Refusal> {
        let (cost, basis) = self.profiled(pool, model, chunk_tokens, known)?;
        Ok((CostModel::Profile(Box::new(cost)).compiled(), basis))
    }

    /// The cost of an instance on devices of a known profile, and its origin.
    pub(super) fn profiled(
        &self,
        pool: &raw::RawPool,
        model: &Model,
        chunk_tokens: u32,
        known: &KnownEngine,
    ) -> Result<(ProfileCost, String), Refusal> {
        let (profile, basis) = self.profile().ok_or(("device", "has no profile of its operations".into()))?;
        let cause = "is missing; without the model's shape there is nothing to predict from";
        let shape = model.shape.as_ref().ok_or_else(|| ("calibration", cause.to_owned()))?;
        shape.check_split(pool.devices_per_instance).map_err(|cause| ("devices_per_instance", cause))?;
        let cost = ProfileCost {
            shape: shape.on(profile),
            profile: DeviceProfile::clone(profile),
            chunk_tokens,
            all_reduce: self.all_reduce(pool)?,
            engine: known.cost,
        };
        Ok((cost, format!("{basis}; engine {}", known.name)))
    }

    fn all_reduce(&self, pool: &raw::RawPool) -> Result<Option<AllReduce>, Refusal> {
        let devices = pool.devices_per_instance;
        let stated = pool.interconnect.as_ref().map(interconnect).transpose()?;
        if devices == 1 {
            return Ok(None);
        }
        let key = "devices_per_instance";
        if devices > DEVICES_MAX {
            return Err((
                key,
                format!("is {devices}; the cost of sharing a model is known up to {DEVICES_MAX}"),
            ));
        }
        let missing = "is missing; it tells how several are linked, unless interconnect does";
        let links = stated.or_else(|| self.part.map(|part| Interconnect::of(part, devices)));
        Ok(links.ok_or_else(|| ("device", missing.to_owned()))?.all_reduce(devices))
    }
}

/// The links that a pool states.
fn interconnect(raw: &raw::RawInterconnect) -> Result<Interconnect, Refusal> {
    match raw {
        raw::RawInterconnect::Named(name) => {
            let found = Interconnect::NAMED.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
            let names = Interconnect::NAMED.map(|(name, _)| name).join(", ");
            let unknown = || format!("is '{name}'; known are {names}, and {{ gb_per_s, latency_s }}");
            Ok(found.ok_or_else(|| ("interconnect", unknown()))?.1)
        }
        raw::RawInterconnect::Stated(link) => {
            let is_rate = link.gb_per_s > 0.0 && link.latency_s >= 0.0;
            let cause =
                || "needs gb_per_s above 0, per device and direction, and latency_s of 0 or more".into();
            let rated = is_rate.then(|| Interconnect::of_rate(link.gb_per_s, Seconds(link.latency_s)));
            rated.ok_or_else(|| ("interconnect", cause()))
        }
    }
}

/// The engine profile at `path`, a directory or a document; `None` for other documents.
fn engine_profile(path: &Path, devices: u32) -> Result<Option<EngineProfile>, String> {
    if path.is_dir() {
        return EngineProfile::read_directory(&TableDirectory::find(path, devices)).map(Some);
    }
    // errors are reported by the later, full read
    mixfleet_hal::files::read_text(path).map_or(Ok(None), |text| EngineProfile::from_json(&text))
}

/// The times of a part's operations, as far as they were published.
fn datasheet(part: &'static Part) -> DeviceSource {
    let (profile, basis) = match part.reached_profile() {
        Some(profile) => {
            let of = profile.provenance.lenders().join(" and ");
            let own = profile.provenance.evidence.iter().any(|kind| kind.basis == EvidenceBasis::Measured);
            let basis = match (own, of.is_empty()) {
                (true, true) => format!("kernel times published for {}", part.id),
                (true, false) => {
                    format!("kernel times published for {}, and for {of} as shares of datasheets", part.id)
                }
                _ => format!("datasheet of {}, lowered to the shares that kernels reach on {of}", part.id),
            };
            (profile, basis)
        }
        None => (
            part.best_profile(),
            format!("half the datasheet of {}, for which no kernel times were published", part.id),
        ),
    };
    DeviceSource { profile, basis }
}

/// The cost model of an engine's tables, which hold for one model on a fixed number of devices.
fn of_engine(
    engine: &EngineProfile,
    devices: u32,
    model: &Model,
    chunk_tokens: u32,
    all_reduce: Option<AllReduce>,
) -> Result<(CostModel, String), Refusal> {
    let key = "devices_per_instance";
    let measured = engine.devices;
    if measured != devices {
        return Err((key, format!("is {devices}, and the profile was measured with {measured}")));
    }
    let plain = |name: &str| -> String {
        name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
    };
    let (of, name) = (&engine.model, &model.name);
    if name != INLINE && !of.is_empty() && !plain(of).contains(&plain(name)) {
        return Err(("profile", format!("is of the model {of}, and the fleet serves {name}")));
    }
    if all_reduce.is_some() && model.shape.is_none() {
        return Err((key, format!("is {devices}; without the model's shape its cost is not known")));
    }
    let sums = all_reduce.zip(model.shape.as_ref());
    let more_s = |rows| sums.map_or(0.0, |(all_reduce, shape)| all_reduce.of_step(shape, rows, true).0);
    let tables = engine.tables(model.layers, chunk_tokens, more_s).map_err(|cause| ("profile", cause))?;
    Ok((CostModel::Tables(Arc::new(tables)), "profile of a serving engine".into()))
}

fn check(calibration: &raw::Calibration) -> Result<(), Refusal> {
    let raw::Calibration { prefill_s, decode_s } = calibration;
    if prefill_s.is_none() && decode_s.is_none() {
        return Err(("calibration", "is empty; give prefill_s, decode_s, or both".into()));
    }
    let prefill = prefill_s.map(|PrefillCoefficients { overhead, per_token, per_token_squared }| {
        [("overhead", overhead), ("per_token", per_token), ("per_token_squared", per_token_squared)]
    });
    let decode = decode_s.map(|DecodeCoefficients { base, per_sequence, per_kv_token }| {
        [("base", base), ("per_sequence", per_sequence), ("per_kv_token", per_kv_token)]
    });
    match prefill.into_iter().chain(decode).flatten().find(|(_, value)| !(value.is_finite() && *value >= 0.0))
    {
        Some((name, value)) => Err(("calibration", format!("{name} is {value}; it must be 0 or more"))),
        None => Ok(()),
    }
}

/// Coefficients that match `cost` at prompts of 512, 8192 and 65536 tokens, and at steps of 1 and 64
/// sequences with little and much context.
fn fit(cost: &CostModel) -> Coefficients {
    let prompt = |tokens: u32| (f64::from(tokens), cost.prefill_s(0, tokens).0);
    let [(x0, y0), (x1, y1), (x2, y2)] = [512, 8192, 65_536].map(prompt);
    // Newton's divided differences.
    let (first, second) = ((y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1));
    let per_token_squared = ((second - first) / (x2 - x0)).max(0.0);
    let per_token = (first - per_token_squared * (x0 + x1)).max(0.0);
    let overhead = (y0 - per_token * x0 - per_token_squared * x0 * x0).max(0.0);
    let step = |batch: u32, context: u64| cost.decode_step_s(batch, u64::from(batch) * context).0;
    let (one, many, full) = (step(1, 64), step(64, 64), step(64, 8192));
    let per_kv_token = ((full - many) / (64.0 * (8192.0 - 64.0))).max(0.0);
    let per_sequence = ((many - one) / 63.0 - 64.0 * per_kv_token).max(0.0);
    let base = (one - per_sequence - 64.0 * per_kv_token).max(0.0);
    Coefficients {
        prefill_s: PrefillCoefficients { overhead, per_token, per_token_squared },
        decode_s: DecodeCoefficients { base, per_sequence, per_kv_token },
    }
}
