//! Instances with attention offload: a plan's rates against a simulation.

use crate::common::fleet_from;
use crate::common::full_loop::FullLoop;
use mixfleet_hal::catalog::part;
use mixfleet_hal::units::{BytesPerSecond, GB, Seconds};
use mixfleet_hal::{DType, StoredAs};
use mixfleet_scheduler::engines;
use mixfleet_scheduler::models::find;
use mixfleet_scheduler::plan::candidates::{
    InstanceKind, PartKernels, ProductsKind, RequestSize, ServiceLevel,
};
use mixfleet_scheduler::plan::layouts::InstanceLayout;
use mixfleet_scheduler::plan::program::Duty;

const ENGINE: &str = "vllm";
/// Four cards of 400 Gbit/s each, at what such a card was measured to reach (arXiv 2405.01814).
const NETWORK_GB_PER_S: f64 = 4.0 * 45.7;
const PRICES: [(&str, f64); 3] = [("H100-SXM-80GB", 2.69), ("RTX-4090", 0.34), ("H20-96GB", 0.80)];

fn price(id: &str) -> f64 {
    PRICES.iter().find(|(known, _)| *known == id).unwrap().1
}

fn kernels(id: &str) -> PartKernels {
    PartKernels::of(part(id).unwrap())
}

/// Four H100 with the weights of the model, and devices that attend for them.
struct Case {
    attending: Option<(&'static str, u32)>,
    size: RequestSize,
    tbt: f64,
}

impl Case {
    fn usd_per_hour(&self) -> f64 {
        let attending = self.attending.map_or(0.0, |(id, count)| price(id) * f64::from(count));
        4.0 * price("H100-SXM-80GB") + attending
    }

    fn kind(&self) -> InstanceKind {
        let (model, engine) = (find("llama-3.1-70b").unwrap(), engines::find(ENGINE).unwrap());
        let (own, layout) = (part("H100-SXM-80GB").unwrap(), InstanceLayout::of(4));
        let (h100, stored) = (kernels("H100-SXM-80GB"), StoredAs::Plain(DType::Bf16));
        let Some((id, count)) = self.attending else {
            return InstanceKind::of((own, &h100), layout, (model, 0.0), stored, engine).unwrap();
        };
        let products = ProductsKind::of((own, &h100), layout, model, stored, engine).unwrap();
        products.with(&kernels(id), count, BytesPerSecond(NETWORK_GB_PER_S * GB)).unwrap()
    }

    /// Sequences in a step, and the time of a step of one instance that decodes, by the rates of a plan.
    fn planned(&self) -> (u32, Seconds) {
        let level = ServiceLevel { ttft: Seconds(30.0), tbt: Seconds(self.tbt) };
        let carried = self.kind().carries(Duty::Decode, &self.size, &level).unwrap();
        (carried.batch, carried.latency)
    }

    /// Tokens per second of one instance that decodes for this many clients, whose prompts others compute,
    /// while all of them decode.
    fn simulated(&self, clients: u32, step: Seconds) -> f64 {
        let device = self.attending.map_or_else(
            || "device = \"H100-SXM-80GB\"".to_owned(),
            |(id, count)| format!("device = \"attn:H100-SXM-80GB,{id}\"\nattn_devices = {count}"),
        );
        let text = format!(
            "version = 1\n[model]\nname = \"llama-3.1-70b\"\n[slo]\ntbt_s = {}\n[engine]\nname = \"{ENGINE}\"\n\
             [[pool]]\nname = \"prefill\"\nrole = \"prefill\"\ncount = 8\ndevice = \"H100-SXM-80GB\"\n\
             devices_per_instance = 4\nnic_gb_per_s = {NETWORK_GB_PER_S:?}\n\
             [[pool]]\nname = \"decode\"\nrole = \"decode\"\n{device}\ndevices_per_instance = 4\n\
             nic_gb_per_s = {NETWORK_GB_PER_S:?}\nmax_sequences = {clients}\n",
            self.tbt
        );
        let RequestSize { input_tokens, output_tokens, .. } = self.size;
        let answer = step * f64::from(output_tokens);
        FullLoop { clients, input_tokens, output_tokens, answer }.tokens_per_s(&fleet_from(&text))
    }
}

/// Gains at equal cost of attention on parts that are rich in bandwidth: LLaMA-70B on four H100 with 16 RTX
/// 4090 at a context of 2K, and with 8 H20 at 4K, against four H100 alone. A single H20 loses.
#[test]
fn plan_and_simulation_agree_on_what_attention_apart_gains_and_where_it_loses() {
    let size =
        |context: u32| RequestSize { input_tokens: context - 256, output_tokens: 513, cached_share: 0.0 };
    for (id, count, context, wins) in
        [("RTX-4090", 16, 2048, None), ("H20-96GB", 8, 4096, Some(true)), ("H20-96GB", 1, 2048, Some(false))]
    {
        let case = |attending| Case { attending, size: size(context), tbt: 0.05 };
        let of = |case: Case| {
            let (batch, step) = case.planned();
            let (planned, simulated) = (f64::from(batch) / step.0, case.simulated(batch, step));
            let usd = |tokens_per_s: f64| case.usd_per_hour() / (tokens_per_s * 3600.0) * 1e6;
            eprintln!(
                "{:?} at {context}: {batch} sequences, {planned:.0} tokens/s and ${:.3}/Mtok planned, {simulated:.0} and \
                 ${:.3} simulated",
                case.attending,
                usd(planned),
                usd(simulated)
            );
            assert!(
                (0.98..1.01).contains(&(simulated / planned)),
                "{:?}: {planned} {simulated}",
                case.attending
            );
            [usd(planned), usd(simulated)]
        };
        let (apart, alone) = (of(case(Some((id, count)))), of(case(None)));
        let [planned, simulated] = [0, 1].map(|at| alone[at] / apart[at]);
        eprintln!("{count} x {id} at {context}: gain {planned:.2} planned, {simulated:.2} simulated");
        assert!((simulated / planned - 1.0).abs() < 0.02, "{planned} {simulated}");
        if let Some(wins) = wins {
            assert_eq!([planned > 1.0, simulated > 1.0], [wins; 2], "{planned} {simulated}");
        }
    }
}
