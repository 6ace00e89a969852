//! External engines on the command line: `KIND:http://HOST:PORT` (or https), and their known properties.

use crate::failure::UsageError;
use crate::numbers::USD_PER_HOUR_MIN;
use crate::profiles;
use anyhow::{Context, Result};
use mixfleet_engines::{EngineAddress, EngineKind, HttpEngine, KvEventsAt, system_lookup};
use mixfleet_hal::catalog;
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::units::{Seconds, UsdPerHour};
use mixfleet_hal::{DType, StoredAs};
use mixfleet_runtime::gateway::EngineSpec;
use mixfleet_scheduler::canary::CanaryConfig;
use mixfleet_scheduler::cost::{AllReduce, CostModel, LinkCost, ModelShape, ProfileCost};
use mixfleet_scheduler::fleet::Role;
use mixfleet_scheduler::{engines, models};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Prompt tokens of a step, as engines have them by default.
const CHUNK_TOKENS: u32 = 2048;
/// The network of an engine that does not tell: 100 Gbit/s.
const NIC_GB_PER_S: f64 = 12.5;
/// Engines behind one name at most.
const INSTANCES_MAX: u32 = 256;
/// What a hand-off of KV takes besides its bytes: two requests, and the pull's own messages.
const HAND_OFF_LATENCY: Seconds = Seconds(0.01);

/// Whether canaries prove KV between engines, and the share of divided requests that become some.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct KvCanary(Option<f64>);

impl KvCanary {
    /// When canaries run; none: never.
    pub(crate) fn config(self) -> Option<CanaryConfig> {
        self.0.map(|share| CanaryConfig { share, ..CanaryConfig::default() })
    }
}

impl std::str::FromStr for KvCanary {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "off" {
            return Ok(KvCanary(None));
        }
        let share = text.parse().ok().filter(|share| *share > 0.0 && *share <= 1.0);
        share
            .map(|share| KvCanary(Some(share)))
            .ok_or_else(|| format!("'{text}' is neither off nor a share of requests above 0 and up to 1"))
    }
}

/// An engine as it is written: `KIND:URL[,WORD=VALUE...]`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WorkerEngine {
    kind: EngineKind,
    address: EngineAddress,
    usd_per_hour: Option<f64>,
    /// A part of the catalog.
    part: Option<String>,
    /// Parts that share the model.
    tp: u32,
    /// A known model, whose shape the engine's has.
    shape: Option<String>,
    stored: StoredAs,
    profile: Option<PathBuf>,
    model: Option<String>,
    key_file: Option<PathBuf>,
    /// Trusted authorities for its certificate; by default the system's.
    ca: Option<PathBuf>,
    /// Source of its KV events, in its own notation; by default the engine reports it.
    kv_events: Option<String>,
    kv_replay: Option<String>,
    kv_ranks: u32,
    role: Role,
    /// The network of the engine, each way.
    nic_gb_per_s: f64,
    /// Engines behind its name at most; none if the name is that of one engine.
    instances: Option<u32>,
}

impl std::str::FromStr for WorkerEngine {
    type Err = String;

    #[expect(clippy::too_many_lines, reason = "one arm for each key")]
    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = text.split(',');
        let first = words.next().unwrap_or_default();
        let (kind, address) =
            first.split_once(':').ok_or("expected KIND:http://HOST:PORT or KIND:https://HOST:PORT")?;
        let (address, role) = address.split_once('=').unwrap_or((address, "auto"));
        let role = match role {
            "auto" => Role::Auto,
            "prefill" => Role::Prefill,
            "decode" => Role::Decode,
            other => return Err(format!("unknown role '{other}'; known: prefill, decode, auto")),
        };
        let kind: EngineKind = kind.parse()?;
        if role != Role::Auto && !kind.hands_off() {
            return Err(format!("{kind} hands no KV to other engines, so that it has no role: leave it out"));
        }
        let mut engine = WorkerEngine {
            kind,
            address: address.parse()?,
            usd_per_hour: None,
            part: None,
            tp: 1,
            shape: None,
            stored: StoredAs::Plain(DType::Bf16),
            profile: None,
            model: None,
            key_file: None,
            ca: None,
            kv_events: None,
            kv_replay: None,
            kv_ranks: 1,
            role,
            nic_gb_per_s: NIC_GB_PER_S,
            instances: None,
        };
        for word in words {
            let (name, value) = word.split_once('=').ok_or_else(|| format!("'{word}' is not WORD=VALUE"))?;
            match name {
                "usd" => engine.usd_per_hour = Some(usd(value)?),
                "part" => engine.part = Some(value.to_owned()),
                "tp" => engine.tp = value.parse().map_err(|_| format!("'{value}' is no number of parts"))?,
                "shape" => engine.shape = Some(value.to_owned()),
                "stored" => engine.stored = value.parse()?,
                "profile" => engine.profile = Some(value.into()),
                "model" => engine.model = Some(value.to_owned()),
                "key-file" => engine.key_file = Some(value.into()),
                "ca" => engine.ca = Some(value.into()),
                "kv-events" => engine.kv_events = Some(value.to_owned()),
                "kv-replay" => engine.kv_replay = Some(value.to_owned()),
                "nic-gb-per-s" => engine.nic_gb_per_s = gb_per_s(value)?,
                "instances" => engine.instances = Some(instances(value)?),
                "kv-ranks" => {
                    engine.kv_ranks =
                        value.parse().map_err(|_| format!("'{value}' is no number of ranks"))?;
                }
                _ => {
                    let known = "usd, part, tp, shape, stored, profile, model, key-file, ca, kv-events, kv-replay, kv-ranks, nic-gb-per-s, instances";
                    return Err(format!("unknown word '{name}'; known: {known}"));
                }
            }
        }
        if engine.part.is_some() && engine.profile.is_some() {
            return Err("part and profile both say what it is: give one".into());
        }
        let is_known = engine.part.is_some() || engine.profile.is_some();
        if is_known != engine.shape.is_some() {
            return Err("a prediction needs part or profile, and shape, the name of a known model".into());
        }
        if engine.instances.is_some() && engine.kv_events.as_deref().is_some_and(|events| events != "off") {
            return Err("engines behind one name report the source of their KV events: omit kv-events".into());
        }
        engine.kv_events_at()?;
        Ok(engine)
    }
}

/// Checks that engines with roles can take KV from each other. vLLM's can among themselves; this program's
/// can from vLLM's and the other way round.
///
/// # Errors
/// What of their roles cannot be.
pub(crate) fn check_roles(engines: &[WorkerEngine]) -> Result<(), UsageError> {
    let own = |engine: &&WorkerEngine| engine.kind == EngineKind::Mixfleet && engine.role != Role::Auto;
    let Some(first) = engines.iter().find(own) else { return Ok(()) };
    let (this, role) = (&first.address, format!("{:?}", first.role).to_lowercase());
    let is_wrong = |engine: &&WorkerEngine| match engine.kind {
        EngineKind::Mixfleet => engine.role != Role::Auto && engine.role != first.role,
        EngineKind::Vllm => engine.role == Role::Auto || engine.role == first.role,
        EngineKind::LlamaCpp => false,
    };
    match engines.iter().find(is_wrong) {
        None => Ok(()),
        Some(engine) => Err(UsageError(format!(
            "--worker-engine mixfleet:{this}={role}: KV goes between mixfleet and vLLM, so that each vllm engine needs the \
             other role and each mixfleet engine the same one; {}:{} does not have it",
            engine.kind, engine.address
        ))),
    }
}

fn usd(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|usd: &f64| usd.is_finite());
    let value = value.filter(|usd| *usd == 0.0 || *usd >= USD_PER_HOUR_MIN);
    value.ok_or_else(|| format!("'{text}' is no price in dollars per hour"))
}

fn instances(text: &str) -> Result<u32, String> {
    let count = text.parse().ok().filter(|count| (1..=INSTANCES_MAX).contains(count));
    count.ok_or_else(|| format!("'{text}' is no number of engines from 1 to {INSTANCES_MAX}"))
}

fn gb_per_s(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|rate: &f64| rate.is_finite() && *rate > 0.0);
    value.ok_or_else(|| format!("'{text}' is no rate in GB/s"))
}

impl WorkerEngine {
    /// The engine, or those behind its name, ready to be asked.
    ///
    /// # Errors
    /// The unknown or unreadable property.
    pub(crate) fn open(&self) -> Result<Vec<EngineSpec>> {
        let key = self.key_file.as_deref().map(read_key).transpose()?;
        let mut address = self.address.clone();
        if let Some(file) = &self.ca {
            let pem = mixfleet_hal::files::read_text(file);
            let pem = pem.with_context(|| format!("cannot read ca={}", file.display()))?;
            address = address.believed_from(pem).map_err(UsageError)?;
        }
        let wrong = |why: String| match &self.ca {
            Some(file) => UsageError(format!("ca={}: {why}", file.display())),
            None => UsageError(why),
        };
        let (key, model) = (key.as_deref(), self.model.as_deref());
        let engines = match self.instances {
            Some(count) => {
                HttpEngine::behind_name(self.kind, &address, key, model, count as usize, system_lookup())
            }
            None => HttpEngine::new(self.kind, address, key, self.model.clone()).map(|engine| vec![engine]),
        };
        let (kv_events, cost) = (self.kv_events_at().map_err(UsageError)?, self.cost()?);
        let kv_bytes_per_token = self.known_shape()?.map(|shape| shape.kv_bytes_per_token());
        let spec = |engine: HttpEngine| EngineSpec {
            engine: Arc::new(engine.with_kv_events(kv_events.clone())),
            model: self.model.clone(),
            price: self.usd_per_hour.map(UsdPerHour),
            cost: cost.clone(),
            role: self.role,
            takes_kv: false,
            nic: LinkCost {
                latency: HAND_OFF_LATENCY * 0.5,
                seconds_per_byte: 1e-9 / self.nic_gb_per_s,
                usd_per_byte: 0.0,
            },
            kv_bytes_per_token,
        };
        Ok(engines.map_err(wrong)?.into_iter().map(spec).collect())
    }

    /// Where its KV events come from.
    fn kv_events_at(&self) -> Result<KvEventsAt, String> {
        match &self.kv_events {
            Some(events) => {
                KvEventsAt::given(self.address.host(), events, self.kv_replay.as_deref(), self.kv_ranks)
            }
            None if self.kv_replay.is_some() || self.kv_ranks != 1 => {
                Err("kv-replay and kv-ranks go with kv-events".into())
            }
            None => Ok(KvEventsAt::Asked),
        }
    }

    /// The model's shape, if it is known.
    fn known_shape(&self) -> Result<Option<ModelShape>> {
        let Some(shape) = &self.shape else { return Ok(None) };
        let known = models::find(shape).map_err(|error| UsageError(format!("shape={shape}: {error}")))?;
        Ok(Some(known.shape_as(self.stored)))
    }

    /// The prediction of its times; none if its parts are not given.
    fn cost(&self) -> Result<Option<CostModel>> {
        let Some(whole) = self.known_shape()? else { return Ok(None) };
        let (profile, all_reduce): (DeviceProfile, _) = match (&self.part, &self.profile) {
            (Some(name), _) => {
                let part = catalog::named(name).map_err(|why| UsageError(format!("part={name}: {why}")))?;
                let several = AllReduce::of(part, self.tp);
                (part.best_profile(), several)
            }
            (None, Some(file)) => (profiles::read(file)?, None),
            (None, None) => return Ok(None),
        };
        if self.tp != 1 && all_reduce.is_none() {
            return Err(UsageError(format!(
                "tp={}: the exchange time of this many devices is unknown",
                self.tp
            ))
            .into());
        }
        whole.check_split(self.tp).map_err(|cause| UsageError(format!("tp={}: {cause}", self.tp)))?;
        let name = if self.kind == EngineKind::Vllm { "vllm" } else { "mixfleet" };
        let engine = engines::find(name).map_err(UsageError)?.cost;
        let shape = whole.on(&profile);
        let cost = ProfileCost { profile, shape, chunk_tokens: CHUNK_TOKENS, all_reduce, engine };
        Ok(Some(CostModel::Profile(Box::new(cost)).compiled()))
    }
}

fn read_key(file: &Path) -> Result<String> {
    let text = mixfleet_hal::files::read_text(file);
    let text = text.with_context(|| format!("cannot read the key of an engine in {}", file.display()))?;
    Ok(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<WorkerEngine, String> {
        text.parse()
    }

    #[test]
    fn an_engine_is_read_with_what_is_known_of_it() {
        let engine =
            read("vllm:http://h:8000=auto,usd=2.5,part=H100-SXM-80GB,tp=2,shape=llama-3.1-8b").unwrap();
        assert_eq!((engine.kind, engine.usd_per_hour, engine.tp), (EngineKind::Vllm, Some(2.5), 2));
        let CostModel::Tables(_) = engine.cost().unwrap().unwrap() else { panic!("not compiled") };
        let specs = read("llamacpp:http://[::1]:8080,model=a.gguf").unwrap().open().unwrap();
        let [spec] = &specs[..] else { panic!("not one engine") };
        assert_eq!((spec.engine.name(), spec.model.as_deref()), ("llamacpp:[::1]:8080", Some("a.gguf")));
        assert!(spec.cost.is_none() && spec.price.is_none());
        let specs = read("mixfleet:http://own.default.svc:8000,instances=3,usd=1").unwrap().open().unwrap();
        let names: Vec<&str> = specs.iter().map(|spec| spec.engine.name()).collect();
        let expected = [1, 2, 3].map(|k| format!("mixfleet:own.default.svc:8000#{k}"));
        assert_eq!(names, expected);
        let told = read("vllm:http://h:1,kv-events=tcp://*:5557,kv-replay=tcp://*:5558").unwrap();
        let expected = KvEventsAt::given("h", "tcp://*:5557", Some("tcp://*:5558"), 1);
        assert_eq!(told.kv_events_at(), expected);
        assert_eq!(read("vllm:http://h,kv-events=off").unwrap().kv_events_at(), Ok(KvEventsAt::Off));
    }

    #[test]
    fn a_share_of_canaries_is_off_or_more_than_nothing() {
        let read = |text: &str| text.parse::<KvCanary>();
        assert_eq!(read("off").unwrap().config(), None);
        assert_eq!(read("0.25").unwrap().config().unwrap().share, 0.25);
        for wrong in ["0", "-1", "1.1", "NaN", "inf", "", "on"] {
            assert!(read(wrong).unwrap_err().contains("share of requests"), "{wrong}");
        }
    }

    #[test]
    fn engines_with_roles_can_take_kv_from_each_other() {
        let checked = |words: &[&str]| {
            let engines: Vec<WorkerEngine> = words.iter().map(|word| read(word).unwrap()).collect();
            check_roles(&engines).map_err(|wrong| wrong.to_string())
        };
        for fine in [
            &["mixfleet:http://a=prefill", "vllm:http://b=decode", "mixfleet:http://c=prefill"][..],
            &["vllm:http://a=prefill", "mixfleet:http://b=decode", "llamacpp:http://c"],
            &["vllm:http://a=prefill", "vllm:http://b=decode", "mixfleet:http://c"],
        ] {
            assert_eq!(checked(fine), Ok(()), "{fine:?}");
        }
        for wrong in [
            ["mixfleet:http://a=prefill", "mixfleet:http://b=decode"],
            ["mixfleet:http://a=prefill", "vllm:http://b"],
            ["mixfleet:http://a=decode", "vllm:http://b=decode"],
        ] {
            let said = checked(&wrong).unwrap_err();
            assert!(said.contains("://b does"), "{said}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, part) in [
            ("vllm", "KIND:http"),
            ("ollama:http://h", "unknown kind of engine 'ollama'"),
            ("vllm:h:8000", "http://"),
            ("vllm:ftp://h", "https://"),
            ("llamacpp:http://h=prefill", "hands no KV"),
            ("vllm:http://h=x", "unknown role"),
            ("vllm:http://h,nic-gb-per-s=0", "GB/s"),
            ("vllm:http://h,usd=x", "no price"),
            ("vllm:http://h,instances=0", "from 1 to 256"),
            ("vllm:http://h,instances=2,kv-events=tcp://*:5557", "omit kv-events"),
            ("vllm:http://h,colour=red", "unknown word 'colour'"),
            ("vllm:http://h,part=H100-SXM-80GB", "shape"),
            ("vllm:http://h,kv-events=5557", "tcp://HOST:PORT"),
            ("vllm:http://h,kv-replay=tcp://*:5558", "go with kv-events"),
            ("vllm:http://h,kv-events=tcp://*:5557,kv-ranks=0", "kv-ranks"),
            ("vllm:http://h,shape=llama-3.1-8b", "part or profile"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
        for (text, part) in [
            ("vllm:http://h,part=H1000,shape=llama-3.1-8b", "part=H1000"),
            ("vllm:http://h,part=H100-SXM-80GB,shape=llama-0", "shape=llama-0"),
            ("vllm:http://h,part=H100-SXM-80GB,shape=llama-3.1-8b,tp=3", "tp=3"),
            ("vllm:http://h,key-file=/no/such/file", "/no/such/file"),
            ("vllm:http://h,ca=/no/such/file", "ca=/no/such/file"),
            ("vllm:http://h,ca=/etc/hostname", "https://"),
        ] {
            let error = format!("{:#}", read(text).unwrap().open().err().unwrap());
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
