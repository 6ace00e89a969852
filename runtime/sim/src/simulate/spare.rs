//! Instances whose devices attend to a part of what others decode, beside the prompts that they compute.
//!
//! Delays between instances that share devices: a lender's prompts are slowed by the share of their device's
//! time that attention for others takes when a step begins, and a borrower's decode steps are slowed while
//! its lenders are at work.

use super::engine::Message;
use super::{Setup, World};
use mixfleet_hal::cast::to_u32;
use mixfleet_scheduler::cost::CostModel;
use std::sync::Arc;

/// An instance that shares devices.
#[derive(Clone, Debug)]
struct Sharer {
    /// Its lenders.
    lenders: Vec<u32>,
    /// Its borrowers.
    borrowers: Vec<u32>,
    /// The cost of its steps, without sharing.
    usual: Arc<CostModel>,
    /// The number of instances with work on a device that attends for it, as its steps have it.
    tenants: u32,
}

/// Lenders and borrowers; none in most fleets.
#[derive(Debug, Default)]
pub(super) struct SpareSharing {
    all: Vec<Sharer>,
}

impl SpareSharing {
    pub(super) fn new(setup: &Setup) -> Self {
        if !setup.shares() {
            return SpareSharing::default();
        }
        let of = |instance: &super::InstanceSetup| Sharer {
            lenders: instance.lenders.clone(),
            borrowers: Vec::new(),
            usual: instance.spec.cost.clone(),
            tenants: 1,
        };
        let mut all: Vec<Sharer> = setup.instances.iter().map(of).collect();
        for (borrower, instance) in (0..).zip(&setup.instances) {
            for &lender in &instance.lenders {
                all[lender as usize].borrowers.push(borrower);
            }
        }
        SpareSharing { all }
    }

    /// Changes an instance's own step cost, before sharing.
    pub(super) fn is_usually(&mut self, instance: u32, cost: &Arc<CostModel>) {
        if let Some(sharer) = self.all.get_mut(instance as usize) {
            sharer.usual = cost.clone();
        }
    }
}

impl World<'_> {
    /// The number of instances with work on the busiest device among the lenders of `borrower`.
    fn tenants(&self, borrower: u32) -> u32 {
        let all = &self.sharing.all;
        let works = |instance: &u32| *instance != borrower && !self.engines[*instance as usize].is_idle();
        let on = |lender: &u32| {
            let others = all[*lender as usize].borrowers.iter().filter(|other| works(other)).count();
            1 + u32::from(works(lender)) + to_u32(others)
        };
        all[borrower as usize].lenders.iter().map(on).max().unwrap_or(1)
    }

    /// Before an instance begins a step: its cost given the instances that share its devices.
    pub(super) fn shares(&mut self, instance: u32) {
        let Some(sharer) = self.sharing.all.get(instance as usize) else { return };
        if !self.engines[instance as usize].is_idle() {
            return;
        }
        if !sharer.borrowers.is_empty() {
            let share = |of: &u32| self.engines[*of as usize].spare_share();
            let share = sharer.borrowers.iter().map(share).sum::<f64>();
            let cost = sharer.usual.beside(share);
            self.engines[instance as usize].takes(cost);
        } else if !sharer.lenders.is_empty() {
            let (tenants, usual) = (self.tenants(instance), sharer.usual.clone());
            self.sharing.all[instance as usize].tenants = tenants;
            self.engines[instance as usize].takes(usual.among(tenants).map_or(usual, Arc::new));
        }
    }

    /// After an instance began a step or found none to begin: what others' next steps take beside it.
    pub(super) fn shared(&mut self, instance: u32) {
        let Some(sharer) = self.sharing.all.get(instance as usize) else { return };
        let lenders = sharer.lenders.iter().chain(sharer.borrowers.first().map(|_| &instance));
        let beside = lenders.flat_map(|lender| &self.sharing.all[*lender as usize].borrowers);
        let mut beside: Vec<u32> = beside.copied().filter(|other| *other != instance).collect();
        beside.sort_unstable();
        beside.dedup();
        for other in beside {
            let tenants = self.tenants(other);
            let of = &mut self.sharing.all[other as usize];
            if of.tenants == tenants || self.engines[other as usize].is_idle() {
                continue;
            }
            of.tenants = tenants;
            if let Some(cost) = of.usual.among(tenants) {
                self.send(other, Message::Cost(Arc::new(cost)));
            }
        }
    }
}
