//! The cheapest fleets in which prefill devices also run attention for some decoding requests.
//!
//! Such a fleet divides prompts and decoding, as `serve` and the simulator do: decode instances borrow an
//! even share of the prefill instances' room for KV, and these run attention on that KV, with the times of
//! [`SpareCost`](crate::cost::SpareCost). The time of that attention is not available for prompts: with p(i)
//! and d(i) instances that prompts and answers of class i keep busy, and u(i) the share of its time that each
//! of k lenders spends on the answers,
//!
//! ```text
//! sum_i d(i)  <=  0.9 D          sum_i p(i) + k sum_i u(i) d(i)  <=  0.9 P
//! ```
//!
//! The bound of a market does not count such fleets.

use super::candidates::{InstanceKind, PartKernels};
use super::forms::FleetForm;
use super::linear::Solver;
use super::load::SizeClass;
use super::margin::slower;
use super::market::{BUSY_MAX, FormedFleet, Market, PlannedPool, PlannedSpare};
use super::offered::MarketKind;
use super::program::Duty;
use crate::cost::{AttnSplit, Lending, Partition};
use mixfleet_hal::cast::{to_u32, to_u64};
use mixfleet_hal::units::{Bytes, Ordered};

/// Fleets of each sort that divide prompts and decoding whose instances are tried.
const EACH: usize = 3;
/// Numbers of instances that decode which are tried at most.
const COUNTS: u32 = 16;
/// How often the number of prefill instances is raised by the shortfall.
const RAISES: usize = 8;

/// The instances of a fleet that divides prompts and decoding.
struct Divided<'a> {
    prefill: &'a MarketKind,
    decode: &'a MarketKind,
    /// Decode instances that use remote devices for attention.
    borrower: InstanceKind,
    /// Classes that both serve.
    served: Vec<usize>,
    /// Decode instances without remote devices.
    most: u32,
}

impl Market {
    /// The cheapest fleet in which devices that compute prompts attend to a part of what others decode,
    /// whether or not it costs less than others.
    ///
    /// # Errors
    /// Why there is none.
    pub fn spare_attention(&self, solver: &dyn Solver) -> Result<FormedFleet, String> {
        if self.regions().len() > 1 {
            return Err("attention on devices of other instances is not planned over several regions".into());
        }
        self.ask.engine.check_apart(1)?;
        for stored in &self.ask.stored {
            Partition::attention(&self.ask.model.shape_as(*stored), 1, AttnSplit::Request)?;
        }
        let [_, same, unlike, _] = self.forms();
        let mut why = "no fleet has instances for prompts and others for decoding".to_owned();
        let mut found: Vec<FormedFleet> = Vec::new();
        for forms in [same, unlike] {
            for fleet in self.best_of(solver, forms, EACH) {
                match self.divided(&fleet).and_then(|of| self.cheapest_spare(&fleet, &of)) {
                    Ok(fleet) => found.push(fleet),
                    Err(cause) => why = cause,
                }
            }
        }
        found.into_iter().min_by_key(|fleet| Ordered(fleet.usd_per_hour.0)).ok_or(why)
    }

    /// The instances of a fleet, one kind of each duty.
    fn divided(&self, fleet: &FormedFleet) -> Result<Divided<'_>, String> {
        let ask = &self.ask;
        let kind = |duty: Duty| {
            let pool = fleet.pools.iter().find(|pool| pool.duty == duty).ok_or("no such instances")?;
            let own = |of: &&MarketKind| {
                (of.part, of.instance.layout) == (pool.part, pool.layout)
                    && ask.stored[of.stored] == fleet.stored
            };
            self.kinds.iter().find(own).ok_or("no such instances")
        };
        let (prefill, decode) = (kind(Duty::Prefill)?, kind(Duty::Decode)?);
        let layout = decode.instance.layout;
        ask.engine.check_apart(layout.devices)?;
        if layout.stages > 1 || !layout.is_by_columns() {
            return Err("stages of layers and experts keep all of their KV".into());
        }
        let kernels = [decode.part, prefill.part].map(|part| PartKernels::of(ask.parts[part].part));
        let own = (ask.parts[decode.part].part, &kernels[0]);
        let (model, network) = ((ask.model, fleet.stored), ask.nic);
        let borrower = InstanceKind::with_others(own, &kernels[1], layout, model, ask.engine, network)?;
        let errors =
            [decode, prefill].map(|of| ask.engine.likely_error(&of.instance.profile, &borrower.shape));
        let error = errors[0].zip(errors[1]).map(|(one, other)| one.max(other));
        let borrower = match slower(error, ask.confidence) {
            1.0 => borrower,
            times => borrower.slowed(times),
        };
        let does = |class: &usize| {
            prefill.load_in_time(1, *class).is_some() && decode.load_in_time(2, *class).is_some()
        };
        let served: Vec<usize> = (0..ask.classes.len()).filter(does).collect();
        let rate: f64 = served.iter().map(|&class| ask.classes[class].rate).sum();
        if rate < self.rate() - self.left_out_max() {
            return Err("too few requests can be served so within the objectives".into());
        }
        let most = fleet.pools.iter().filter(|pool| pool.duty == Duty::Decode).map(|pool| pool.count).sum();
        Ok(Divided { prefill, decode, borrower, served, most })
    }

    fn cheapest_spare(&self, fleet: &FormedFleet, of: &Divided<'_>) -> Result<FormedFleet, String> {
        let mut counts: Vec<u32> = (1..=COUNTS)
            .map(|at| to_u32((u64::from(of.most) * u64::from(at)).div_ceil(COUNTS.into())))
            .collect();
        counts.dedup();
        let mut best: Option<FormedFleet> = None;
        let mut why = "devices that compute prompts have no room or no time for it".to_owned();
        for &decode in counts.iter().filter(|count| **count > 0) {
            let pools = match self.with_prompts(of, decode) {
                Ok(prefill) => self.spare_pools(of, [prefill, decode]),
                Err(cause) => {
                    why = cause;
                    continue;
                }
            };
            let usd_per_hour = self.usd_per_hour(&pools, fleet.stored);
            let fits = |(part, most): (usize, u32)| {
                pools.iter().map(|pool| pool.devices_of(part)).sum::<u64>() <= most.into()
            };
            let offers = self.ask.parts.iter().enumerate();
            let in_stock = offers.filter_map(|(part, offer)| Some((part, offer.most?))).all(fits);
            if in_stock && best.as_ref().is_none_or(|known| usd_per_hour < known.usd_per_hour) {
                best = Some(FormedFleet { form: FleetForm::Free, stored: fleet.stored, pools, usd_per_hour });
            }
        }
        best.ok_or(why)
    }

    /// The fewest prefill instances beside this many decode instances.
    fn with_prompts(&self, of: &Divided<'_>, decode: u32) -> Result<u32, String> {
        let prompts: f64 =
            self.busy(of, |class| of.prefill.loads[1][class].map(|own| own.max(of.prefill.links[class])));
        let mut prefill = to_u32(to_u64((prompts / BUSY_MAX).ceil())).max(1);
        for _ in 0..RAISES {
            let lent = self.attended(of, Lending::of(prefill, decode), decode)?;
            let wanted = (prompts + lent) / BUSY_MAX;
            if wanted <= f64::from(prefill) {
                return Ok(prefill);
            }
            prefill = to_u32(to_u64(wanted.ceil()));
        }
        Err("attention takes more of the devices that compute prompts than more of these give".into())
    }

    /// The instances that a sum over served classes of what one request per second keeps busy comes to.
    fn busy(&self, of: &Divided<'_>, load: impl Fn(usize) -> Option<f64>) -> f64 {
        of.served.iter().map(|&class| load(class).unwrap_or(0.0) * self.ask.classes[class].rate).sum()
    }

    /// Number of prefill instances that attention to others' sequences keeps busy.
    fn attended(&self, of: &Divided<'_>, lending: Lending, decode: u32) -> Result<f64, String> {
        let (ask, lender) = (&self.ask, &of.prefill.instance);
        let (room, share) = (lender.room().0, lending.even_share());
        let borrowed = share * room * f64::from(lending.lenders) / f64::from(lending.borrowers);
        let devices = lender.layout.devices * lending.lenders;
        let borrower = of.borrower.borrowing(devices, lending.borrowers + 1, Bytes(borrowed));
        let (mut decodes, mut lent, mut most) = (0.0, 0.0, 0.0f64);
        for &class in &of.served {
            let SizeClass { ref size, rate, ref slowest } = ask.classes[class];
            let longest = size.input_tokens.saturating_add(size.output_tokens.max(ask.answer_tokens_max));
            let prompt = lender.shape.sequence_bytes(slowest.input_tokens.max(size.input_tokens)) as f64;
            if !borrower.holds(longest) || prompt > (1.0 - share) * room {
                return Err("the lent memory leaves too little room for KV".into());
            }
            let carried = borrower.carries(Duty::Decode, size, &ask.level)?;
            let taken = borrower.takes_of_others(size, carried.batch);
            let busy = carried.instances.max(of.decode.links[class]) * rate;
            decodes += busy;
            lent += carried.instances * rate * taken * f64::from(lending.lenders);
            most = most.max(taken * f64::from(lending.borrowers));
        }
        if decodes > BUSY_MAX * f64::from(decode) {
            return Err("attention beside prompts is so slow that no instance is saved".into());
        }
        let late = |class: &usize| {
            let alone = lender.fastest(&ask.classes[*class].slowest);
            alone.map_or(true, |(ttft, _)| ttft.0 > ask.level.ttft.0 * (1.0 - most))
        };
        match of.served.iter().any(late) {
            true => Err("prompts are too late beside attention to others".into()),
            false => Ok(lent),
        }
    }

    fn spare_pools(&self, of: &Divided<'_>, [prefill, decode]: [u32; 2]) -> Vec<PlannedPool> {
        let pool = |of: &MarketKind, duty: Duty, count: u32, spare: Option<PlannedSpare>| {
            let (part, layout) = (of.part, of.instance.layout);
            let count = count + self.ask.parts[part].spares;
            PlannedPool { part, layout, attends: None, spare, duty, count }
        };
        let spare = PlannedSpare { part: of.prefill.part, layout: of.prefill.instance.layout };
        vec![
            pool(of.prefill, Duty::Prefill, prefill, None),
            pool(of.decode, Duty::Decode, decode, Some(spare)),
        ]
    }
}
