//! What instances of a part on offer carry of a load.

use super::candidates::{InstanceKind, PartKernels};
use super::layouts::{IN_SERVER, InstanceLayout, OVER_SERVERS};
use super::load::SizeClass;
use super::margin::slower;
use super::market::{CHEAPER, DUTIES, MarketAsk, PlannedAttention, taken};
use super::program::Duty;
use mixfleet_hal::units::BytesPerSecond;
use std::collections::BTreeMap;

/// Instances of a part, and what they carry.
#[derive(Debug)]
pub(super) struct MarketKind {
    pub(super) part: usize,
    /// The part whose devices attend, if they are others.
    pub(super) attends: Option<usize>,
    /// Index of the dtype among the requested ones.
    pub(super) stored: usize,
    pub(super) instance: InstanceKind,
    /// Instances that one request per second keeps busy, by duty and class; `None` where they cannot serve
    /// it.
    pub(super) loads: [Vec<Option<f64>>; 3],
    /// Whether the slowest prompt of a class is in time, by class.
    pub(super) in_time: Vec<bool>,
    /// The same of what KV takes of the network between prefill and decode, by class.
    pub(super) links: Vec<f64>,
}

/// What instances of one part carry.
#[derive(Debug)]
pub struct PartOnOffer(pub(super) Vec<MarketKind>);

impl PartOnOffer {
    /// What instances of the part of this index carry of the load of `ask`.
    pub fn new(ask: &MarketAsk, part: usize) -> Self {
        let kernels = PartKernels::of(ask.parts[part].part);
        let of_dtype = |stored: usize| {
            let stages = BTreeMap::new();
            Instances { ask, part, stored, kernels: &kernels, stages, found: Vec::new() }.all()
        };
        PartOnOffer((0..ask.stored.len()).flat_map(of_dtype).collect())
    }
}

/// The instances of a part in one dtype.
struct Instances<'a> {
    ask: &'a MarketAsk,
    part: usize,
    stored: usize,
    kernels: &'a PartKernels,
    /// What a stage is, by its layout: most of the work is in its times, which do not depend on the others.
    stages: BTreeMap<InstanceLayout, Option<InstanceKind>>,
    found: Vec<MarketKind>,
}

impl Instances<'_> {
    fn all(mut self) -> Vec<MarketKind> {
        for devices in IN_SERVER {
            let before = self.found.len();
            let more_may = self.add(devices);
            // where twice as many devices do nothing better, still more do not either
            if self.found.len() > before && !more_may {
                break;
            }
        }
        for devices in OVER_SERVERS {
            if self.is_all_served() {
                break;
            }
            self.add(devices);
        }
        self.found
    }

    /// Adds the worthwhile instances of this many devices, and returns whether more devices may be
    /// worthwhile.
    fn add(&mut self, devices: u32) -> bool {
        let (fewer, mut more_may) = (self.found.len(), false);
        let part = self.ask.parts[self.part].part;
        let shape = self.ask.model.shape_as(self.ask.stored[self.stored]);
        for (at, layout) in
            InstanceLayout::all(devices, part, &shape, self.ask.engine).into_iter().enumerate()
        {
            let Some(kind) = self.kind(layout) else { continue };
            more_may |= kind.may_better(&self.found[..fewer]);
            if at == 0 || kind.betters(&self.found) {
                self.found.push(kind);
            }
        }
        more_may
    }

    /// Whether prompts and answers of all classes are served in time.
    fn is_all_served(&self) -> bool {
        let does = |class: usize, duty: usize| {
            self.found.iter().any(|kind| kind.load_in_time(duty, class).is_some())
        };
        (0..self.ask.classes.len()).all(|class| (1..DUTIES.len()).all(|duty| does(class, duty)))
    }

    /// `None` if there are not that many devices, or they hold no request.
    fn kind(&mut self, layout: InstanceLayout) -> Option<MarketKind> {
        let (ask, stored) = (self.ask, self.ask.stored[self.stored]);
        let offer = &ask.parts[self.part];
        let memory = offer.part.memory_bytes() * f64::from(layout.devices);
        if offer.most.is_some_and(|most| most < layout.devices) || memory < ask.model.weight_bytes(stored) {
            return None;
        }
        let (own, model) = ((offer.part, self.kernels), (ask.model, ask.expert_skew));
        let of = || InstanceKind::of(own, layout, model, stored, ask.engine).ok();
        let stage = self.stages.entry(layout.stage()).or_insert_with(of).clone()?;
        MarketKind::new(ask, (self.part, None, self.stored), stage.in_stages(layout.stages, ask.nic))
    }
}

/// Seconds that the KV of a prompt takes of a network.
pub(super) fn kv_s(instance: &InstanceKind, class: &SizeClass, nic: BytesPerSecond) -> f64 {
    instance.sent_bytes(class.size.input_tokens) / nic.0
}

impl MarketKind {
    /// `None` if the instance holds no request.
    pub(super) fn new(
        ask: &MarketAsk,
        (part, attends, stored): (usize, Option<usize>, usize),
        instance: InstanceKind,
    ) -> Option<Self> {
        // each side may be the one that a step waits for
        let others = instance.attending.iter().map(|others| &others.profile);
        let errors = std::iter::once(&instance.profile)
            .chain(others)
            .map(|profile| ask.engine.likely_error(profile, &instance.shape));
        let error = errors.collect::<Option<Vec<f64>>>().and_then(|all| all.into_iter().reduce(f64::max));
        let instance = match slower(error, ask.confidence) {
            1.0 => instance,
            times => instance.slowed(times),
        };
        let holds = |class: &SizeClass| {
            let answer = class.size.output_tokens.max(ask.answer_tokens_max);
            instance.holds(class.size.input_tokens.saturating_add(answer))
        };
        let carries = |duty: Duty, class: &SizeClass| {
            let carried = instance.carries(duty, &class.size, &ask.level).ok()?;
            (duty == Duty::Prefill || holds(class)).then_some(carried.instances)
        };
        // where answers make too little room for their prompts, an instance turns from the one to the other
        let in_turns =
            |class: &SizeClass| Some(carries(Duty::Prefill, class)? + carries(Duty::Decode, class)?);
        let load = |duty: Duty, class: &SizeClass| match duty {
            Duty::Whole => carries(duty, class).or_else(|| in_turns(class)),
            duty => carries(duty, class),
        };
        let loads = DUTIES.map(|duty| ask.classes.iter().map(|class| load(duty, class)).collect::<Vec<_>>());
        let links = ask.classes.iter().map(|class| kv_s(&instance, class, ask.nic)).collect();
        // the too slow ones remain, to report how slow they are
        let held = ask.classes.iter().any(|class| instance.fastest(&class.size).is_ok());
        let slowest = |class: &SizeClass| instance.fastest(&class.slowest);
        let in_time = |class: &SizeClass| slowest(class).is_ok_and(|(ttft, _)| ttft <= ask.level.ttft);
        let in_time = ask.classes.iter().map(in_time).collect();
        held.then_some(MarketKind { part, attends, stored, instance, loads, in_time, links })
    }

    /// The devices that attend, if they are others.
    pub(super) fn attention(&self) -> Option<PlannedAttention> {
        let (part, others) = self.attends.zip(self.instance.attending.as_ref())?;
        Some(PlannedAttention { part, devices: others.devices })
    }

    /// What one instance takes: parts, and devices of each.
    pub(super) fn takes(&self) -> impl Iterator<Item = (usize, u32)> + use<> {
        taken(self.part, self.instance.layout, self.attention())
    }

    /// Devices that one request per second of a class keeps busy.
    pub(super) fn devices(&self, duty: usize, class: usize) -> Option<f64> {
        Some(self.loads[duty][class]? * f64::from(self.instance.layout.devices))
    }

    /// Instances that one request per second of a class keeps busy, if the slowest requests are in time.
    pub(super) fn load_in_time(&self, duty: usize, class: usize) -> Option<f64> {
        self.loads[duty][class].filter(|_| DUTIES[duty] == Duty::Decode || self.in_time[class])
    }

    /// Devices that one request per second of a class keeps busy, if the slowest requests are in time.
    pub(super) fn devices_in_time(&self, duty: usize, class: usize) -> Option<f64> {
        self.load_in_time(duty, class).and_then(|_| self.devices(duty, class))
    }

    /// Whether it carries something for less than others, or what they do not carry in time.
    fn betters(&self, others: &[MarketKind]) -> bool {
        self.any_load(|duty, class| {
            let Some(own) = self.devices_in_time(duty, class) else { return false };
            let least = others.iter().filter_map(|other| other.devices_in_time(duty, class)).reduce(f64::min);
            least.is_none_or(|least| own < CHEAPER * least)
        })
    }

    /// Whether still more devices may carry something for less than `fewer`, or what these do not carry.
    fn may_better(&self, fewer: &[MarketKind]) -> bool {
        let late = |class: usize| fewer.iter().all(|kind| !kind.in_time[class]);
        (0..self.in_time.len()).any(late)
            || self.any_load(|duty, class| {
                let least = fewer.iter().filter_map(|kind| kind.devices(duty, class)).reduce(f64::min);
                let both = self.devices(duty, class).zip(least);
                both.is_none_or(|(own, least)| own < CHEAPER * least)
            })
    }

    fn any_load(&self, is: impl Fn(usize, usize) -> bool) -> bool {
        (0..DUTIES.len()).any(|duty| (0..self.in_time.len()).any(|class| is(duty, class)))
    }
}
