//! What instances of a part on offer carry of a load.

use super::candidates::{InstanceKind, PartKernels};
use super::load::SizeClass;
use super::margin::slower;
use super::market::{CHEAPER, DUTIES, MarketAsk};
use super::program::Duty;
use mixfleet_hal::units::BytesPerSecond;

/// Devices that share a copy of the model.
const DEVICES: [u32; 4] = [1, 2, 4, 8];

/// Instances of a part, and what they carry.
#[derive(Debug)]
pub(super) struct MarketKind {
    pub(super) part: usize,
    /// Index of the dtype among those that are asked for.
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
        let mut kinds: Vec<MarketKind> = Vec::new();
        let kernels = PartKernels::of(ask.parts[part].part);
        for stored in 0..ask.stored.len() {
            let first = kinds.len();
            for devices in DEVICES {
                let Some(kind) = MarketKind::new(ask, (part, stored), &kernels, devices) else { continue };
                // where twice as many devices do nothing better, still more do not either
                let more_may = kinds[first..].last().is_none_or(|fewer| kind.may_better(fewer));
                kinds.push(kind);
                if !more_may {
                    break;
                }
            }
        }
        PartOnOffer(kinds)
    }
}

/// Seconds that the KV of a prompt takes of a network.
pub(super) fn kv_s(instance: &InstanceKind, class: &SizeClass, nic: BytesPerSecond) -> f64 {
    instance.shape.sequence_bytes(class.size.input_tokens) as f64 / nic.0
}

impl MarketKind {
    /// `None` if there are not so many devices, or they hold no request.
    fn new(
        ask: &MarketAsk,
        (part, stored): (usize, usize),
        kernels: &PartKernels,
        devices: u32,
    ) -> Option<Self> {
        let (offer, stored_as) = (&ask.parts[part], ask.stored[stored]);
        let memory = offer.part.memory_bytes() * f64::from(devices);
        if offer.most.is_some_and(|most| most < devices) || memory < ask.model.weight_bytes(stored_as) {
            return None;
        }
        let instance =
            InstanceKind::of((offer.part, kernels), devices, ask.model, stored_as, ask.engine).ok()?;
        let error = ask.engine.likely_error(&instance.profile, &instance.shape);
        let instance = match slower(error, ask.confidence) {
            1.0 => instance,
            times => instance.slowed(times),
        };
        let holds = |class: &SizeClass| {
            let answer = class.size.output_tokens.max(ask.answer_tokens_max);
            instance.holds(class.size.input_tokens.saturating_add(answer))
        };
        let carries = |duty: Duty, class: &SizeClass| {
            let carried = instance.carries(duty, &class.size, &ask.level, None).ok()?;
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
        // those that are too slow remain, to say how slow they are
        let held = ask.classes.iter().any(|class| instance.fastest(&class.size).is_ok());
        let slowest = |class: &SizeClass| instance.fastest(&class.slowest);
        let in_time = |class: &SizeClass| slowest(class).is_ok_and(|(ttft, _)| ttft <= ask.level.ttft);
        let in_time = ask.classes.iter().map(in_time).collect();
        held.then_some(MarketKind { part, stored, instance, loads, in_time, links })
    }

    /// Devices that one request per second of a class keeps busy.
    pub(super) fn devices(&self, duty: usize, class: usize) -> Option<f64> {
        Some(self.loads[duty][class]? * f64::from(self.instance.devices))
    }

    /// Instances that one request per second of a class keeps busy, if the slowest of them is in time.
    pub(super) fn load_in_time(&self, duty: usize, class: usize) -> Option<f64> {
        self.loads[duty][class].filter(|_| DUTIES[duty] == Duty::Decode || self.in_time[class])
    }

    /// Devices that one request per second of a class keeps busy, if the slowest of them is in time.
    pub(super) fn devices_in_time(&self, duty: usize, class: usize) -> Option<f64> {
        self.load_in_time(duty, class).and_then(|_| self.devices(duty, class))
    }

    /// Whether it carries something for less than `fewer` devices of its part, or these do not carry all.
    fn may_better(&self, fewer: &MarketKind) -> bool {
        let [many, few] = [self, fewer].map(|kind| f64::from(kind.instance.devices));
        let late = fewer.in_time.contains(&false);
        let loads = self.loads.iter().flatten().zip(fewer.loads.iter().flatten());
        let cheaper = |pair: (&Option<f64>, &Option<f64>)| match pair {
            (Some(own), Some(other)) => own * many < CHEAPER * other * few,
            _ => true,
        };
        late || loads.into_iter().any(cheaper)
    }
}
