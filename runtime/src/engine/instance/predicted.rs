//! What the steps of an instance are predicted to take, and when one counts as hung.

use super::Loaded;
use crate::engine::calibrate::{self, CalibrationBudget};
use crate::engine::members::OtherMembers;
use crate::env::Env;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Error, Result};
use mixfleet_scheduler::cost::{
    Attending, CalibrationRatios, Coefficients, CostModel, EngineCost, LinkCost, LockstepCost, ModelShape,
    PipelineCost, Prefill, ProfileCost, StepCalibration,
};
use std::sync::Arc;
use std::time::Duration;

/// The timeout of a step as a multiple of its predicted time, with bounds.
const STEP_TIMEOUT_FACTOR: f64 = 20.0;
const STEP_TIMEOUT_MIN: Duration = Duration::from_secs(60);
const STEP_TIMEOUT_MAX: Duration = Duration::from_secs(600);

impl Loaded {
    /// The timeout after which the device counts as hung: many times the predicted time of the largest step.
    pub(super) fn step_timeout(&self, cost: &CostModel) -> Duration {
        let (tokens, sequences) = (self.step_tokens_max(), self.forward.shape().sequences_max);
        let context = self.forward.config().context_max.saturating_sub(tokens);
        let largest = Prefill { context, tokens, last: true };
        step_timeout(cost.step_s(&[largest], sequences, self.kv_capacity_tokens()))
    }

    /// What determines the cost of the model's steps here.
    pub fn cost_shape(&self) -> ModelShape {
        let shape = self.forward.shape();
        self.forward.config().cost_shape(shape.activations, shape.kv, shape.block_tokens)
    }

    /// The cost model of steps here by the catalog's profile of the only device, adjusted to the measurements
    /// ([`Loaded::calibrate`]), and the ratio to the catalog.
    pub fn predicted_by_part(
        &self,
        profile: DeviceProfile,
        measured: &StepCalibration,
    ) -> (CostModel, CalibrationRatios) {
        measured.adjusting(self.predicted_by(profile).compiled())
    }

    /// The cost model of steps here from the measurements alone.
    pub fn predicted_by_steps(&self, measured: &StepCalibration) -> CostModel {
        self.predicted_by_whole(measured.alone(), measured.coefficients())
    }

    /// The cost model of steps here by coefficients of whole steps.
    #[cfg(any(test, feature = "testing"))]
    pub fn predicted_by_coefficients(&self, whole: Coefficients) -> CostModel {
        self.predicted_by_whole(CostModel::Coefficients(whole), whole)
    }

    /// Stages take a share each of what all take one after the other, hops included, and of two batches one
    /// is attended to beside the products of the other.
    fn predicted_by_whole(&self, whole: CostModel, coefficients: Coefficients) -> CostModel {
        let device = &*self.spec_device;
        let staggers = |others: &OtherMembers| others.partition().is_some() && others.may_stagger(device);
        if self.others.as_ref().is_some_and(staggers) {
            return CostModel::Lockstep(Arc::new(LockstepCost::measured(coefficients)));
        }
        let Some((stages, chunk_tokens)) = self.others.as_ref().and_then(OtherMembers::stages) else {
            return whole;
        };
        CostModel::Pipeline(Arc::new(PipelineCost {
            whole,
            stages: to_u32(stages),
            chunk_tokens,
            hop: LinkCost::default(),
            bytes_per_token: 0.0,
            step_tokens: Some(self.step_tokens_max()),
        }))
    }

    /// Measures the cost of steps; only before serving.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn calibrate(&mut self, env: &dyn Env, budget: CalibrationBudget) -> Result<StepCalibration> {
        match &mut self.others {
            None => calibrate::measure(&*self.spec_device, &self.forward, env, budget),
            Some(others) => {
                let others = (others, &self.batch.page_devices);
                calibrate::measure_divided(&*self.spec_device, &self.forward, others, env, budget)
            }
        }
    }

    /// The cost model of steps here by existing profiles of its devices, in their order, where all but the
    /// first one attend. Measures what crosses between them; only before serving.
    ///
    /// # Errors
    /// Errors of the devices, and `Unsupported` for other instances.
    pub fn predicted_by_members(&mut self, profiles: &[DeviceProfile], env: &dyn Env) -> Result<CostModel> {
        let attending = self.others.as_mut().and_then(|others| Some((others.partition()?.clone(), others)));
        let Some((partition, others)) = attending else {
            return Err(Error::unsupported(
                "only devices that attend are predicted by the profiles of several",
            ));
        };
        let device = &*self.spec_device;
        let exchange = others.exchange_cost((device, &self.forward), env)?;
        let how = Attending { staggered: others.may_stagger(device), ..Attending::ENGINE };
        let tokens_max = self.forward.shape().tokens_max;
        CostModel::lockstep(&partition, &self.cost_shape(), profiles, (exchange, how), tokens_max)
            .map_err(Error::invalid)
    }

    /// The cost model of steps here by an existing profile of the only device.
    pub fn predicted_by(&self, profile: DeviceProfile) -> CostModel {
        let cost = ProfileCost {
            profile,
            shape: self.cost_shape(),
            chunk_tokens: self.forward.shape().tokens_max,
            all_reduce: None,
            engine: EngineCost::OURS,
        };
        CostModel::Profile(Box::new(cost))
    }
}

fn step_timeout(predicted: Seconds) -> Duration {
    let bounds = (STEP_TIMEOUT_MIN.as_secs_f64(), STEP_TIMEOUT_MAX.as_secs_f64());
    let timeout_s = (STEP_TIMEOUT_FACTOR * predicted.0).clamp(bounds.0, bounds.1);
    Duration::from_secs_f64(if timeout_s.is_finite() { timeout_s } else { bounds.1 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_may_take_some_times_what_is_predicted_and_a_minute_at_least() {
        let of = |predicted_s| step_timeout(Seconds(predicted_s)).as_secs();
        assert_eq!([0.0, 1e-3, 3.0].map(of), [60; 3], "a machine may be busy");
        assert_eq!([5.0, 10.0, 30.0].map(of), [100, 200, 600]);
        assert_eq!([31.0, 1e9, f64::INFINITY, f64::NAN].map(of), [600; 4]);
    }
}
