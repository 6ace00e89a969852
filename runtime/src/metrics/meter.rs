//! Cost of requests: the rent of devices, shared by the requests at work on them.
//!
//! At any time each request in progress on a device owes an equal part of its rent. Rent that no request owes
//! is idle rent. So the dollars of requests and of idle devices add up to the rent of the devices that are
//! up, for any batches. It follows the fleet machine's events: placements, first tokens, ends.

use super::{ClassLabels, DeviceLabels, Metrics};
use crate::request::ServiceTier;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::batch::RequestId;
use mixfleet_scheduler::fleet::{Action, Event, Fleet, InstanceId, Terms};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// What of an event concerns money or time.
pub(crate) enum Noted {
    Arrived {
        request: RequestId,
        class: u32,
    },
    PromptDone(RequestId),
    /// Its answer was given in full, or not: none, or the number of its tokens.
    Ended {
        request: RequestId,
        answered: Option<u32>,
    },
    Up {
        instance: InstanceId,
        device: Arc<str>,
        usd_per_s: Option<f64>,
    },
    Down(InstanceId),
}

impl Noted {
    /// What of `event` is noted, which `fleet` has not handled yet.
    pub(crate) fn of(event: &Event, fleet: &Fleet) -> Option<Self> {
        Some(match event {
            Event::Arrived(arrival) => Noted::Arrived { request: arrival.request, class: arrival.class },
            Event::PrefillDone { request, .. } => Noted::PromptDone(*request),
            Event::Finished { request } => {
                Noted::Ended { request: *request, answered: Some(fleet.generated(*request)) }
            }
            Event::Cancelled { request } => Noted::Ended { request: *request, answered: None },
            Event::InstanceUp(instance) => Noted::Up {
                instance: instance.id,
                device: instance.device.clone(),
                usd_per_s: instance.price.map(|price| (price * Seconds(1.0)).0),
            },
            Event::InstanceDown { instance } => Noted::Down(*instance),
            _ => return None,
        })
    }
}

/// The devices that are up and the requests in progress.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    devices: BTreeMap<InstanceId, DeviceMeter>,
    requests: HashMap<RequestId, RequestMeter>,
}

#[derive(Debug)]
struct DeviceMeter {
    labels: DeviceLabels,
    usd_per_s: Option<f64>,
    /// Until when its rent is shared out.
    at: Seconds,
    /// Requests at work there.
    requests: u32,
    /// The debt at `at` of a request that was in progress from the start.
    owed: f64,
}

#[derive(Debug)]
struct RequestMeter {
    class: ClassLabels,
    /// When work on it began, as far as that is known, and its first token.
    began: Seconds,
    first: Option<Seconds>,
    decode: InstanceId,
    /// Where it is now, and what a request owed there when it came; none while it is at work nowhere, since
    /// that instance was lost.
    on: InstanceId,
    came_at: Option<f64>,
    prompt_usd: f64,
    generation_usd: f64,
    /// When and where it was placed, and its predictions.
    placed: (Seconds, InstanceId),
    predicted: Option<Terms>,
    /// Whether the first token's time is only assumed.
    is_guessed: bool,
}

/// Times of a request from its latest placement to its end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RequestPhases {
    pub(crate) queue: Seconds,
    /// Behind the gateway with the engine's own queue.
    pub(crate) prefill: Seconds,
    pub(crate) decode: Seconds,
}

impl DeviceMeter {
    fn settle(&mut self, now: Seconds, metrics: &Metrics) {
        let seconds = (now - self.at).0.max(0.0);
        self.at = now;
        let Some(usd) = self.usd_per_s.map(|usd_per_s| usd_per_s * seconds) else { return };
        if self.requests > 0 {
            self.owed += usd / f64::from(self.requests);
            metrics.device_busy_usd.get_or_create(&self.labels).inc_by(usd);
        } else {
            metrics.device_idle_usd.get_or_create(&self.labels).inc_by(usd);
        }
    }
}

impl RequestMeter {
    fn owe(&mut self, usd: f64) {
        if self.first.is_some() { self.generation_usd += usd } else { self.prompt_usd += usd }
    }
}

impl Meter {
    /// Shares out the rent of all devices until now.
    pub(crate) fn settle(&mut self, now: Seconds, metrics: &Metrics) {
        self.devices.values_mut().for_each(|device| device.settle(now, metrics));
    }

    /// Processes an event and the machine's actions.
    pub(crate) fn note(&mut self, now: Seconds, noted: Noted, actions: &[Action], metrics: &Metrics) {
        match noted {
            Noted::Arrived { request, class } => {
                let placed = actions.iter().rev().find_map(|action| match action {
                    Action::Place { prefill, decode, explanation, .. } => {
                        Some((prefill, decode, explanation))
                    }
                    _ => None,
                });
                let Some((prefill, decode, explanation)) = placed else {
                    return self.ended(request, None, now, metrics);
                };
                let terms = explanation.chosen().and_then(|chosen| chosen.terms);
                // what it cost where it was before it had to be placed again
                self.go(request, now, metrics);
                let before = self.requests.remove(&request);
                let [prompt_usd, generation_usd] =
                    before.map_or([0.0; 2], |met| [met.prompt_usd, met.generation_usd]);
                let met = RequestMeter {
                    class: ClassLabels::of(class),
                    began: now,
                    first: None,
                    decode: *decode,
                    on: *prefill,
                    came_at: None,
                    prompt_usd,
                    generation_usd,
                    placed: (now, *prefill),
                    predicted: terms,
                    is_guessed: false,
                };
                self.requests.insert(request, met);
                self.come(request, now, metrics);
            }
            Noted::PromptDone(request) => self.prompt_done(request, now, metrics),
            Noted::Ended { request, answered } => self.ended(request, answered, now, metrics),
            Noted::Up { instance, device, usd_per_s } => {
                let labels = DeviceLabels { device: device.to_string() };
                let fresh = DeviceMeter { labels, usd_per_s, at: now, requests: 0, owed: 0.0 };
                let known = self.devices.entry(instance).or_insert(fresh);
                known.settle(now, metrics);
                known.usd_per_s = usd_per_s;
                if let Some(usd) = usd_per_s {
                    // the remainder of dividing a price in $/h is not shown
                    let usd = (usd * 3600.0 * 1e6).round() / 1e6;
                    metrics.device_usd_per_hour.get_or_create(&known.labels).set(usd);
                }
            }
            Noted::Down(instance) => {
                let there: Vec<RequestId> =
                    self.requests.iter().filter(|(_, met)| met.on == instance).map(|(id, _)| *id).collect();
                there.into_iter().for_each(|request| self.go(request, now, metrics));
                if let Some(mut device) = self.devices.remove(&instance) {
                    device.settle(now, metrics);
                    metrics.device_usd_per_hour.remove(&device.labels);
                }
            }
        }
    }

    /// Work on a request begins, which waited until then.
    pub(crate) fn began(&mut self, request: RequestId, now: Seconds) {
        if let Some(met) = self.requests.get_mut(&request) {
            met.began = now;
        }
    }

    /// The time of a request's first token will only be assumed.
    pub(crate) fn guess(&mut self, request: RequestId) {
        if let Some(met) = self.requests.get_mut(&request) {
            met.is_guessed = true;
        }
    }

    /// Dollars that a request has cost; none if its device has no price, or is lost.
    pub(crate) fn usd(&mut self, request: RequestId, now: Seconds, metrics: &Metrics) -> Option<f64> {
        let met = self.requests.get(&request)?;
        let device = self.devices.get_mut(&met.on)?;
        device.usd_per_s?;
        device.settle(now, metrics);
        let owed = met.came_at.map_or(0.0, |came_at| device.owed - came_at);
        Some(met.prompt_usd + met.generation_usd + owed)
    }

    /// The phases of a request that is complete now; none if its first token was not seen.
    pub(crate) fn phases(&self, request: RequestId, now: Seconds) -> Option<RequestPhases> {
        let met = self.requests.get(&request).filter(|met| !met.is_guessed)?;
        let (first, placed_at) = (met.first?, met.placed.0);
        Some(RequestPhases { queue: met.began - placed_at, prefill: first - met.began, decode: now - first })
    }

    fn come(&mut self, request: RequestId, now: Seconds, metrics: &Metrics) {
        let Some(met) = self.requests.get_mut(&request) else { return };
        let Some(device) = self.devices.get_mut(&met.on) else { return };
        device.settle(now, metrics);
        device.requests += 1;
        met.came_at = Some(device.owed);
    }

    fn go(&mut self, request: RequestId, now: Seconds, metrics: &Metrics) {
        let Some(met) = self.requests.get_mut(&request) else { return };
        // a device without this request may be another one of the same name
        let Some(came_at) = met.came_at.take() else { return };
        let Some(device) = self.devices.get_mut(&met.on) else { return };
        device.settle(now, metrics);
        device.requests -= 1;
        met.owe(device.owed - came_at);
    }

    fn prompt_done(&mut self, request: RequestId, now: Seconds, metrics: &Metrics) {
        if self.requests.get(&request).is_none_or(|met| met.first.is_some()) {
            return;
        }
        self.go(request, now, metrics);
        let Some(met) = self.requests.get_mut(&request) else { return };
        (met.first, met.on) = (Some(now), met.decode);
        if !met.is_guessed {
            metrics.request_prefill_time_s.observe((now - met.began).0);
            if let Some(terms) = &met.predicted {
                metrics.predicted_ttft_s.observe(terms.ttft_s);
                metrics.predicted_tbt_s.observe(terms.tbt_s);
                let (placed_at, on) = met.placed;
                if let Some(device) = self.devices.get(&on) {
                    let predicted = [terms.uncorrected_s()[0], terms.ttft_s];
                    metrics.predicted(&device.labels.device, "ttft", (now - placed_at).0, predicted);
                }
            }
        }
        self.come(request, now, metrics);
    }

    fn ended(&mut self, request: RequestId, answered: Option<u32>, now: Seconds, metrics: &Metrics) {
        self.go(request, now, metrics);
        let Some(met) = self.requests.remove(&request) else { return };
        let is_priced = self.devices.get(&met.on).is_some_and(|device| device.usd_per_s.is_some());
        if is_priced || met.prompt_usd + met.generation_usd > 0.0 {
            metrics.prompt_usd.get_or_create(&met.class).inc_by(met.prompt_usd);
            metrics.generation_usd.get_or_create(&met.class).inc_by(met.generation_usd);
            if answered.is_some() {
                let usd = met.prompt_usd + met.generation_usd;
                metrics.request_usd.get_or_create(&met.class).observe(usd);
            }
        }
        let Some((first, tokens)) = met.first.zip(answered).filter(|_| !met.is_guessed) else { return };
        metrics.request_decode_time_s.observe((now - first).0);
        let (device, gaps) = (self.devices.get(&met.on), tokens.saturating_sub(1));
        if let (Some(terms), Some(device)) = (&met.predicted, device.filter(|_| gaps > 0)) {
            let predicted = [terms.uncorrected_s()[1], terms.tbt_s];
            let predicted = predicted.map(|tbt_s| tbt_s + terms.transfer_s / f64::from(gaps));
            let measured_s = (now - first).0 / f64::from(gaps);
            metrics.predicted(&device.labels.device, "tbt", measured_s, predicted);
        }
    }
}

impl ClassLabels {
    /// The labels of a class of the fleet machine's.
    pub(crate) fn of(class: u32) -> Self {
        let class = match class {
            flex if flex == ServiceTier::Flex as u32 => "flex",
            priority if priority == ServiceTier::Priority as u32 => "priority",
            _ => "default",
        };
        ClassLabels { class }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::DType;
    use mixfleet_hal::units::UsdPerHour;
    use mixfleet_scheduler::cost::{Coefficients, CostModel, DecodeCoefficients, PrefillCoefficients};
    use mixfleet_scheduler::fleet::{Arrival, Fleet, FleetConfig, Instance, Role};

    const SEVEN_TWO: UsdPerHour = UsdPerHour(7.2);

    fn instance(id: u32, role: Role) -> Event {
        Event::InstanceUp(Instance {
            id: InstanceId(id),
            device: format!("d{id}").into(),
            role,
            pool: 0,
            cost: Arc::new(CostModel::Coefficients(Coefficients {
                prefill_s: PrefillCoefficients { overhead: 0.5, per_token: 0.0, per_token_squared: 0.0 },
                decode_s: DecodeCoefficients { base: 0.01, per_sequence: 0.0, per_kv_token: 0.0 },
            })),
            price: Some(SEVEN_TWO),
            kv_capacity_tokens: 100_000,
            nic: None,
            kv_block_tokens: 16,
            kv_dtype: DType::F16,
            prefill_tokens_beside_decode_max: None,
            step_tokens_max: 512,
            kv_copies: mixfleet_scheduler::cost::KvCopyCost::default(),
            kv_parts: mixfleet_scheduler::batch::PageParts::ONE,
        })
    }

    fn arrival(request: RequestId, class: u32) -> Event {
        Event::Arrived(Arrival { request, prompt_tokens: 100, max_tokens: 100, class, ..Arrival::default() })
    }

    /// Tells a fleet machine, and the meter what it answers.
    fn step(fleet: &mut Fleet, metrics: &Metrics, seconds: f64, event: Event) {
        if let Event::DecodeStep { .. } = event {
            return fleet.step(Seconds(seconds), event, &mut Vec::new());
        }
        let (noted, mut actions) = (Noted::of(&event, fleet), Vec::new());
        fleet.step(Seconds(seconds), event, &mut actions);
        metrics.note(Seconds(seconds), noted.unwrap(), &actions);
    }

    #[test]
    fn rent_is_shared_by_those_at_work_and_adds_up() {
        let metrics = Metrics::new();
        let mut fleet = Fleet::new(FleetConfig::new(1, 1));
        let mut at = |seconds: f64, event: Event| step(&mut fleet, &metrics, seconds, event);
        at(0.0, instance(0, Role::Auto));
        at(10.0, arrival(1, ServiceTier::Default as u32));
        at(12.0, Event::PrefillDone { request: 1, instance: InstanceId(0) });
        at(14.0, arrival(2, ServiceTier::Flex as u32));
        assert!((metrics.usd(2, Seconds(16.0)).unwrap() - 0.002).abs() < 1e-12, "half of two seconds");
        let (instance, requests) = (InstanceId(0), vec![1]);
        at(15.0, Event::DecodeStep { instance, requests, tokens: 100 });
        at(18.0, Event::Finished { request: 1 });
        at(20.0, Event::Cancelled { request: 2 });
        metrics.settle(Seconds(30.0));
        let rent = "mixfleet_device_usd_per_hour{device=\"d0\"}";
        assert!(metrics.encode().contains(&format!("{rent} 7.2\n")), "{}", metrics.encode());
        at(30.0, Event::InstanceDown { instance: InstanceId(0) });
        assert!(!metrics.encode().contains(rent), "{}", metrics.encode());
        // $7.20 an hour are $0.002 a second
        let device = DeviceLabels { device: "d0".into() };
        let near = |value: f64, expected: f64| assert!((value - expected).abs() < 1e-9, "{value} {expected}");
        near(metrics.device_idle_usd.get_or_create(&device).get(), 0.002 * 20.0);
        near(metrics.device_busy_usd.get_or_create(&device).get(), 0.002 * 10.0);
        let class = |tier: ServiceTier| ClassLabels::of(tier as u32);
        near(metrics.prompt_usd.get_or_create(&class(ServiceTier::Default)).get(), 0.002 * 2.0);
        near(metrics.generation_usd.get_or_create(&class(ServiceTier::Default)).get(), 0.002 * 4.0);
        near(metrics.prompt_usd.get_or_create(&class(ServiceTier::Flex)).get(), 0.002 * 4.0);
        let text = metrics.encode();
        for line in [
            "mixfleet_request_usd_count{class=\"default\"} 1",
            "mixfleet_request_prefill_time_seconds_sum 2.0",
            "mixfleet_request_decode_time_seconds_sum 6.0",
            "mixfleet_predicted_time_to_first_token_seconds_count 1",
            // 2 s where 0.5 were predicted, and 60 ms where 10 were
            "mixfleet_prediction_error_ratios_sum{device=\"d0\",kind=\"ttft\",correction=\"after\"} 4.0",
            "mixfleet_prediction_error_ratios_sum{device=\"d0\",kind=\"tbt\",correction=\"before\"} 6.0",
        ] {
            assert!(text.lines().any(|other| other == line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("mixfleet_request_usd_count{class=\"flex\"}"), "it was not answered");
    }

    #[test]
    fn a_device_that_is_lost_costs_nothing_more_and_its_requests_owe_what_was() {
        let metrics = Metrics::new();
        let mut fleet = Fleet::new(FleetConfig::new(1, 1));
        let mut at = |seconds: f64, event: Event| step(&mut fleet, &metrics, seconds, event);
        at(0.0, instance(0, Role::Auto));
        at(0.0, arrival(1, 0));
        at(5.0, Event::InstanceDown { instance: InstanceId(0) });
        at(9.0, Event::Cancelled { request: 1 });
        let owed = metrics.prompt_usd.get_or_create(&ClassLabels::of(0)).get();
        assert!((owed - 0.01).abs() < 1e-9, "{owed}");
    }

    #[test]
    fn a_request_owes_what_it_did_before_it_had_to_be_placed_again_and_nothing_of_a_namesake() {
        let metrics = Metrics::new();
        let mut fleet = Fleet::new(FleetConfig::new(1, 1));
        let mut at = |seconds: f64, event: Event| step(&mut fleet, &metrics, seconds, event);
        at(0.0, instance(0, Role::Auto));
        at(0.0, arrival(1, 0));
        at(0.0, arrival(2, 0));
        at(4.0, Event::InstanceDown { instance: InstanceId(0) });
        at(6.0, instance(0, Role::Auto));
        at(7.0, Event::Cancelled { request: 2 });
        at(8.0, arrival(1, 0));
        at(9.0, Event::Cancelled { request: 1 });
        let owed = metrics.prompt_usd.get_or_create(&ClassLabels::of(0)).get();
        assert!((owed - 0.002 * 5.0).abs() < 1e-9, "{owed}");
        let device = DeviceLabels { device: "d0".into() };
        let busy = metrics.device_busy_usd.get_or_create(&device).get();
        assert!((busy - owed).abs() < 1e-9, "{busy} {owed}");
    }
}
