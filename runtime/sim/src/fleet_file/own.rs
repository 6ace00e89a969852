//! Devices of the machine that reads a fleet file, with what serving measured on them.

use mixfleet_hal::catalog::Part;
use mixfleet_hal::units::Bytes;
use mixfleet_scheduler::cost::{CostModel, ModelShape, StepCalibration};

/// A device of this machine.
#[derive(Clone, Debug)]
pub struct OwnDevice {
    /// Its selector, as serving takes it: `cpu`, `cuda:0`.
    pub selector: String,
    /// The part of the catalog that it is, if it is known.
    pub part: Option<&'static Part>,
    /// Its memory.
    pub memory: Bytes,
    /// Calibrations of this machine that serving has saved.
    pub calibrations: Vec<OwnCalibration>,
}

/// The times of a model's steps on a device of this machine.
#[derive(Clone, Debug)]
pub struct OwnCalibration {
    /// The model.
    pub shape: ModelShape,
    /// The times.
    pub steps: StepCalibration,
    /// The day on which they were measured, as 2026-11-30.
    pub measured_on: String,
    /// Whether few sizes were measured.
    pub brief: bool,
}

impl OwnDevice {
    /// The calibration for a model: of several the latest with all sizes.
    pub fn calibration(&self, shape: &ModelShape) -> Option<&OwnCalibration> {
        let of_model = self.calibrations.iter().filter(|known| known.shape.computes_as(shape));
        of_model.max_by_key(|known| (!known.brief, &known.measured_on))
    }

    /// The cost model by a calibration, which adjusts the one that the catalog gives, if its part is known;
    /// and its origin.
    pub fn predicted(
        &self,
        OwnCalibration { steps, measured_on, .. }: &OwnCalibration,
        catalog: Option<(&Part, CostModel)>,
    ) -> (CostModel, String) {
        let Some((part, base)) = catalog else {
            return (steps.alone(), format!("{}: calibration of {measured_on}", self.selector));
        };
        let (cost, ratios) = steps.adjusting(base);
        let [prefill, decode] = [ratios.prefill, ratios.decode].map(|times| 1.0 / times);
        let basis = format!(
            "{}: {} at {prefill:.2} of the catalog's prefill and {decode:.2} of its decode, by the calibration of \
             {measured_on}",
            self.selector, part.id
        );
        (cost, basis)
    }

    /// What there is no calibration for, and how there is one.
    pub fn lacks(&self, model: &str, devices: u32) -> String {
        let selector = &self.selector;
        match devices {
            1 => format!(
                "{selector} has no calibration for {model}: 'mixfleet serve --device {selector} --model ...' keeps one \
                 at its start"
            ),
            _ => format!("a calibration of {selector} is of one device, and instances have {devices}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::fleet_file::{
        FleetFile, FleetFileError, FleetSources, InstancePool, OwnCalibration, OwnDevice,
    };
    use mixfleet_hal::DType;
    use mixfleet_hal::catalog::part;
    use mixfleet_hal::units::{Bytes, GB};
    use mixfleet_scheduler::cost::{CostModel, ModelShape, Prefill, StepCalibration, StepPoint};
    use mixfleet_scheduler::models::find;
    use std::path::Path;

    fn shape(model: &str) -> ModelShape {
        find(model).unwrap().shape(DType::Bf16)
    }

    /// What steps of `cost` take, times a factor for prompts and one for decodes.
    fn measured(cost: &CostModel, [prefill, decode]: [f64; 2]) -> StepCalibration {
        let of_chunk = |(size, context)| {
            let step = cost.step_s(&[Prefill { context, tokens: size, last: true }], 0, 0);
            StepPoint { size, context, seconds: step.0 * prefill }
        };
        let of_batch = |(size, context): (u32, u32)| {
            let step = cost.decode_step_s(size, u64::from(size) * u64::from(context));
            StepPoint { size, context, seconds: step.0 * decode }
        };
        let sizes = [(16, 0), (384, 0), (16, 1024), (384, 1024)];
        let batches = [(1, 64), (64, 64), (1, 4096), (64, 4096)];
        StepCalibration {
            prefill: sizes.map(of_chunk).to_vec(),
            decode: batches.map(of_batch).to_vec(),
            head: vec![(1, 0.0)],
            chunk_tokens: 384,
        }
    }

    fn kept(model: &str, steps: &StepCalibration, measured_on: &str, brief: bool) -> OwnCalibration {
        OwnCalibration { shape: shape(model), steps: steps.clone(), measured_on: measured_on.into(), brief }
    }

    /// The pool of such a device, or why there is none.
    fn pool(
        device: &str,
        keys: &str,
        calibrations: &[OwnCalibration],
    ) -> Result<InstancePool, FleetFileError> {
        let text = format!(
            "version = 1\n[model]\nname = \"llama-3.1-8b\"\n[[pool]]\nname = \"a\"\ndevice = \"{device}\"\n{keys}"
        );
        let find = |selector: &str| {
            let part = match selector {
                "cpu" => None,
                "cuda:0" => part("RTX-4090"),
                "cuda:7" => return Err("there is no device 7".into()),
                _ => return Ok(None),
            };
            let (selector, calibrations) = (selector.into(), calibrations.to_vec());
            Ok(Some(OwnDevice { selector, part, memory: Bytes(64.0 * GB), calibrations }))
        };
        let profile = |path: &Path| Err(format!("{} is not read", path.display()));
        let sources = FleetSources { profile: &profile, device: &find };
        let file = FleetFile::parse_with(&text, Path::new(""), sources)?;
        Ok(file.pools.into_iter().next().unwrap())
    }

    #[test]
    fn a_device_without_a_part_takes_what_was_measured() {
        let catalog = pool("RTX-4090", "", &[]).unwrap().cost;
        let [steps, old, brief] =
            [[20.0, 10.0], [7.0, 7.0], [9.0, 9.0]].map(|times| measured(&catalog, times));
        let known = [
            kept("llama-3.1-8b", &old, "2026-10-01", false),
            kept("llama-3.1-8b", &steps, "2026-11-30", false),
            kept("llama-3.1-8b", &brief, "2026-12-01", true),
            kept("qwen2.5-7b", &old, "2026-12-02", false),
        ];
        let own = pool("cpu", "", &known).unwrap();
        assert_eq!(own.cost, steps.alone());
        assert_eq!(own.cost_basis, "cpu: calibration of 2026-11-30");
        assert_eq!((own.engine.max_batched_tokens, own.own_device.as_deref()), (384, Some("cpu")));
        assert_eq!((own.device, own.likely_error), (None, None));
        let only_brief = pool("cpu", "", &known[2..]).unwrap();
        assert_eq!(only_brief.cost, brief.alone());
    }

    #[test]
    fn a_known_part_takes_the_catalogs_times_as_adjusted() {
        let plain = pool("RTX-4090", "max_batched_tokens = 384", &[]).unwrap();
        let steps = measured(&plain.cost, [1.25, 2.0]);
        let own = pool("cuda:0", "", &[kept("llama-3.1-8b", &steps, "2026-11-30", false)]).unwrap();
        assert!(own.cost_basis.starts_with("cuda:0: RTX-4090 at 0.80 of the catalog's prefill and 0.50"));
        assert_eq!((own.device.as_deref(), own.usd_per_hour), (Some("RTX-4090"), plain.usd_per_hour));
        let ratio = own.cost.prefill_s(0, 300).0 / plain.cost.prefill_s(0, 300).0;
        assert!((ratio - 1.25).abs() < 0.01, "{ratio}");
        let ratio = own.cost.decode_step_s(8, 8000).0 / plain.cost.decode_step_s(8, 8000).0;
        assert!((ratio - 2.0).abs() < 0.01, "{ratio}");
    }

    #[test]
    fn what_has_no_calibration_says_what_keeps_one() {
        let error = pool("cpu", "", &[]).unwrap_err().to_string();
        assert!(
            error.contains("cpu has no calibration for llama-3.1-8b: 'mixfleet serve --device cpu"),
            "{error}"
        );
        let plain = pool("RTX-4090", "", &[]).unwrap();
        let own = pool("cuda:0", "", &[]).unwrap();
        assert_eq!(own.cost, plain.cost);
        assert!(own.cost_basis.contains("cuda:0 has no calibration for llama-3.1-8b"), "{}", own.cost_basis);
        let steps = measured(&plain.cost, [1.0; 2]);
        let known = [kept("llama-3.1-8b", &steps, "2026-11-30", false)];
        let two = pool("cuda:0", "devices_per_instance = 2", &known).unwrap();
        assert!(two.cost_basis.ends_with("a calibration of cuda:0 is of one device, and instances have 2"));
        for (device, says) in [("cuda:7", "there is no device 7"), ("cqu", "no part is called 'cqu'")] {
            let error = pool(device, "", &known).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
