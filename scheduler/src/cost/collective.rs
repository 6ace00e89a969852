//! The time of an all-reduce among the devices of one server, which tensor parallelism pays twice per layer.

use super::ModelShape;
use mixfleet_hal::catalog::Part;
use mixfleet_hal::units::{Bytes, Seconds};
use serde::{Deserialize, Serialize};

/// The interconnect of a server's devices: the classes for which all-reduce times were published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fabric {
    /// 600 GB/s per device, both directions together.
    NvLink3,
    /// 900 GB/s per device, both directions together.
    NvLink4,
    /// 16 lanes through host bridges, 32 GB/s each direction.
    Pcie4,
    /// 16 lanes through host bridges, 64 GB/s each direction.
    Pcie5,
}

/// Message sizes of the columns of [`Fabric::times_us`].
const BYTES: [f64; 10] = [
    512.0,
    8192.0,
    131_072.0,
    524_288.0,
    1_048_576.0,
    2_097_152.0,
    8_388_608.0,
    33_554_432.0,
    134_217_728.0,
    536_870_912.0,
];
/// Numbers of devices of the rows of [`Fabric::times_us`].
const DEVICES: [f64; 3] = [2.0, 4.0, 8.0];

impl Fabric {
    /// Measured all-reduces in microseconds by devices and bytes: NCCL 2.27 to 2.29 on A100 SXM, H100 SXM,
    /// L40S and RTX PRO 6000 Server, from aiconfigurator (Apache-2.0), whose sizes count 2-byte elements.
    const fn times_us(self) -> [[f64; BYTES.len()]; DEVICES.len()] {
        match self {
            Fabric::NvLink3 => [
                [10.0, 11.0, 13.4, 19.4, 40.8, 47.6, 87.1, 224.2, 747.5, 2781.1],
                [14.5, 14.7, 17.8, 22.9, 29.8, 46.2, 111.0, 288.0, 1000.5, 3716.3],
                [22.6, 21.3, 27.4, 30.1, 38.9, 53.7, 128.0, 367.0, 1169.1, 4225.9],
            ],
            Fabric::NvLink4 => [
                [6.2, 6.8, 7.7, 10.7, 14.7, 27.9, 47.3, 143.6, 466.2, 1686.4],
                [9.5, 10.0, 11.4, 14.5, 18.1, 27.7, 62.8, 175.7, 613.2, 2299.7],
                [15.6, 16.0, 19.0, 20.1, 25.4, 38.2, 78.9, 199.8, 578.7, 2111.1],
            ],
            Fabric::Pcie4 => [
                [7.7, 8.1, 18.8, 50.0, 74.8, 120.7, 428.9, 1689.3, 6719.6, 26700.0],
                [11.9, 13.0, 57.7, 163.0, 268.3, 622.1, 2458.8, 9836.6, 39325.0, 156_034.0],
                [22.6, 32.5, 279.9, 502.6, 863.2, 2618.2, 9987.8, 38854.0, 162_481.0, 649_471.0],
            ],
            Fabric::Pcie5 => [
                [6.3, 6.8, 12.2, 31.3, 44.4, 72.0, 243.8, 930.6, 3620.3, 13900.5],
                [13.0, 13.5, 24.9, 78.1, 86.1, 141.7, 508.6, 2022.0, 8037.9, 30489.0],
                [24.6, 26.7, 47.8, 156.1, 131.5, 221.2, 661.4, 2493.6, 9757.4, 38073.0],
            ],
        }
    }

    /// Rate of the link over which the times were measured, as catalogs state it: NVLink in both directions
    /// together, PCIe in one.
    const fn gb_per_s(self) -> f64 {
        match self {
            Fabric::NvLink3 => 600.0,
            Fabric::NvLink4 => 900.0,
            Fabric::Pcie4 => 32.0,
            Fabric::Pcie5 => 64.0,
        }
    }
}

/// The maximum number of devices whose all-reduce was measured: a server.
pub const DEVICES_MAX: u32 = 8;

/// All-reduces among a number of devices.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllReduce {
    /// The devices' interconnect.
    pub fabric: Fabric,
    /// Number of devices, from 2 to [`DEVICES_MAX`].
    pub devices: u32,
    /// Rate of the measured interconnect divided by that of the actual link. It scales the time beyond that
    /// of the smallest message.
    pub slowdown: f64,
    /// Time of each all-reduce beyond the measured interconnect's.
    #[serde(default)]
    pub latency: Seconds,
}

/// The links between the devices of an instance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interconnect {
    /// The measured class that is closest.
    fabric: Fabric,
    /// Rate in GB/s, as the class counts it.
    gb_per_s: f64,
    latency: Seconds,
}

/// Share of its bus that an all-reduce gets where devices cannot read each other's memory: every byte crosses
/// the bus to the host's memory and back.
const THROUGH_HOST: f64 = 0.5;

/// Share of NCCL's time that a sum of few bytes takes where each device reads the others' parts at once: one
/// exchange in place of NCCL's two, a reduction and a broadcast.
const ONE_SHOT: f64 = 0.5;
/// Largest message that engines sum so: vLLM's limit for eight devices.
const ONE_SHOT_BYTES: f64 = 262_144.0;

impl Interconnect {
    const fn new(fabric: Fabric, gb_per_s: f64) -> Self {
        Interconnect { fabric, gb_per_s, latency: Seconds::ZERO }
    }

    /// The interconnects that have a name. `p2p`: devices read each other's memory over PCIe; `host`: they
    /// send through the host's.
    pub const NAMED: [(&str, Interconnect); 7] = [
        ("nvlink3", Interconnect::new(Fabric::NvLink3, 600.0)),
        ("nvlink4", Interconnect::new(Fabric::NvLink4, 900.0)),
        ("nvlink5", Interconnect::new(Fabric::NvLink4, 1800.0)),
        ("pcie4-p2p", Interconnect::new(Fabric::Pcie4, 32.0)),
        ("pcie5-p2p", Interconnect::new(Fabric::Pcie5, 64.0)),
        ("pcie4-host", Interconnect::new(Fabric::Pcie4, 32.0 * THROUGH_HOST)),
        ("pcie5-host", Interconnect::new(Fabric::Pcie5, 64.0 * THROUGH_HOST)),
    ];

    /// Links of `gb_per_s` per device and direction, that add `latency` to each all-reduce.
    pub fn of_rate(gb_per_s: f64, latency: Seconds) -> Self {
        let both = 2.0 * gb_per_s;
        let (fabric, gb_per_s) = match gb_per_s {
            rate if rate < 48.0 => (Fabric::Pcie4, rate),
            rate if rate < 150.0 => (Fabric::Pcie5, rate),
            rate if rate < 375.0 => (Fabric::NvLink3, both),
            _ => (Fabric::NvLink4, both),
        };
        Interconnect { fabric, gb_per_s, latency }
    }

    /// What the catalog tells of `devices` of a part: the scale-up link if there is one, otherwise the host's
    /// bus, which cards for desktops cannot use to read each other's memory.
    pub fn of(part: &Part, devices: u32) -> Self {
        // A bridge joins pairs; larger groups communicate over the host's bus.
        let peer = part.scale_up.filter(|link| devices == 2 || !link.name.contains("bridge"));
        let is_bus = |name: &str| name.starts_with("PCIe") || name == "host";
        let of_desktops = ["GeForce", "Radeon", "Intel Arc"].iter().any(|series| part.name.contains(series));
        let share = if of_desktops { THROUGH_HOST } else { 1.0 };
        match (peer, part.host_link) {
            (Some(link), _) if !is_bus(link.name) && link.gb_s > 0.0 => {
                let fabric = if link.gb_s < 750.0 { Fabric::NvLink3 } else { Fabric::NvLink4 };
                Interconnect::new(fabric, link.gb_s)
            }
            (_, Some(link)) if link.gb_s > 0.0 => {
                let fabric = if link.gb_s < 48.0 { Fabric::Pcie4 } else { Fabric::Pcie5 };
                Interconnect::new(fabric, link.gb_s * share)
            }
            _ => Interconnect::new(Fabric::Pcie4, Fabric::Pcie4.gb_per_s() * share),
        }
    }

    /// Whether devices communicate over the host's bus alone.
    pub fn is_bus(self) -> bool {
        matches!(self.fabric, Fabric::Pcie4 | Fabric::Pcie5)
    }

    /// All-reduces among `devices`. `None` for one device, and for more than were measured.
    pub fn all_reduce(self, devices: u32) -> Option<AllReduce> {
        let Interconnect { fabric, gb_per_s, latency } = self;
        let slowdown = fabric.gb_per_s() / gb_per_s;
        (2..=DEVICES_MAX).contains(&devices).then_some(AllReduce { fabric, devices, slowdown, latency })
    }
}

impl AllReduce {
    /// All-reduces among `devices` of a part, as the catalog has its links. `None` for one device, and for
    /// more than were measured.
    pub fn of(part: &Part, devices: u32) -> Option<Self> {
        Interconnect::of(part, devices).all_reduce(devices)
    }

    /// Time of the all-reduces in a step of `rows`: the partial sums of all rows after attention and after
    /// the MLP of each layer. Sums of 8-bit products are sent in 16 bits. Where devices have whole experts,
    /// every row goes to its experts' devices and back instead, once for each layer with experts.
    /// With `one_shot`, few bytes over NVLink take [`ONE_SHOT`] of NCCL's time.
    pub fn of_step(&self, shape: &ModelShape, rows: u32, one_shot: bool) -> Seconds {
        if shape.spread() > 1 {
            let [_, mixed] = shape.mlp_layers();
            return self.exchange(shape.exchanged_bytes(rows)) * (2.0 * f64::from(mixed));
        }
        let elements = u64::from(rows) * u64::from(shape.hidden);
        let bytes = elements * shape.activation.size_bytes().max(2);
        let bytes = Bytes(bytes as f64);
        let is_link = matches!(self.fabric, Fabric::NvLink3 | Fabric::NvLink4);
        let share = if one_shot && is_link && bytes.0 <= ONE_SHOT_BYTES { ONE_SHOT } else { 1.0 };
        self.time(bytes) * (2.0 * share * f64::from(shape.layers()))
    }

    /// Time of an all-to-all in which each device sends `bytes` to the others: that of the all-reduce in
    /// which it sends as much, `2 (devices - 1) / devices` of the summed bytes.
    fn exchange(&self, bytes: f64) -> Seconds {
        let devices = f64::from(self.devices);
        self.time(Bytes(bytes * devices / (2.0 * (devices - 1.0).max(1.0))))
    }

    /// Time to sum `bytes` over all devices: interpolated between the measured sizes in log space, beyond
    /// them at the rate of the largest.
    pub fn time(&self, bytes: Bytes) -> Seconds {
        let rows = self.fabric.times_us();
        let devices = f64::from(self.devices).clamp(2.0, f64::from(DEVICES_MAX));
        let row = usize::from(devices > DEVICES[1]);
        let share = (devices / DEVICES[row]).log2();
        let (fewer, more) = (&rows[row], &rows[row + 1]);
        let time = |row: &[f64; BYTES.len()]| row[0] + (along(row, bytes.0) - row[0]) * self.slowdown;
        Seconds(1e-6 * ((1.0 - share) * time(fewer) + share * time(more))) + self.latency
    }
}

/// The value of `row` at `bytes`.
fn along(row: &[f64; BYTES.len()], bytes: f64) -> f64 {
    let last = BYTES.len() - 1;
    if bytes >= BYTES[last] {
        return row[last] * bytes / BYTES[last];
    }
    let above = BYTES.partition_point(|known| *known <= bytes);
    if above == 0 {
        return row[0];
    }
    let share = (bytes / BYTES[above - 1]).ln() / (BYTES[above] / BYTES[above - 1]).ln();
    row[above - 1] * (row[above] / row[above - 1]).powf(share)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::catalog::part;

    fn among(id: &str, devices: u32) -> AllReduce {
        AllReduce::of(part(id).unwrap(), devices).unwrap()
    }

    #[test]
    fn measured_sizes_are_met_and_published_examples_reproduced() {
        let us = |id, devices, bytes| among(id, devices).time(Bytes(bytes)).0 * 1e6;
        let close = |got: f64, want: f64| assert!((got / want - 1.0).abs() < 1e-9, "{got} {want}");
        // 8.4 MB on 2, 4 and 8 devices.
        close(us("L40S", 2, 8_388_608.0), 428.9);
        close(us("L40S", 4, 8_388_608.0), 2458.8);
        close(us("H100-SXM-80GB", 8, 8_388_608.0), 78.9);
        // LLaMA-70B, 160 all-reduces: a chunk of 2048 tokens takes 1.6 s over PCIe among four L40S, and a
        // step of 64 sequences about 3 ms over NVLink among four H100.
        let of_70b = |id, tokens: f64| 160.0 * us(id, 4, tokens * 8192.0 * 2.0) * 1e-6;
        assert!((of_70b("L40S", 2048.0) - 1.6).abs() < 0.05);
        assert!((of_70b("H100-SXM-80GB", 64.0) - 2.9e-3).abs() < 1e-4);
    }

    #[test]
    fn one_shot_sums_of_few_bytes_over_nvlink_take_half() {
        let shape = crate::models::find("llama-3.1-70b").unwrap().shape(mixfleet_hal::DType::Bf16);
        let ratio = |id, rows| {
            let of = |one_shot| among(id, 8).of_step(&shape, rows, one_shot).0;
            of(true) / of(false)
        };
        // 16 KiB a row
        assert_eq!((ratio("H100-SXM-80GB", 16), ratio("H100-SXM-80GB", 17)), (0.5, 1.0));
        assert_eq!(ratio("L40S", 1), 1.0);
    }

    #[test]
    fn more_bytes_never_take_less_and_slower_links_take_longer() {
        for id in ["A100-SXM-80GB", "H100-SXM-80GB", "L40S", "RTX-PRO-6000-SE"] {
            for devices in 2..=DEVICES_MAX {
                let times =
                    (18..62).map(|half| among(id, devices).time(Bytes(2f64.powf(f64::from(half) / 2.0))).0);
                let times: Vec<f64> = times.collect();
                // The tables have a dip of up to a sixth where NCCL changes its algorithm.
                assert!(times.windows(2).all(|pair| pair[1] > 0.8 * pair[0]), "{id} {devices}: {times:?}");
            }
        }
        let big = Bytes(64e6);
        assert!(among("V100-SXM2-32GB", 4).time(big) > among("A100-SXM-80GB", 4).time(big));
        assert!(among("B200-SXM", 8).time(big) < among("H100-SXM-80GB", 8).time(big));
        // A desktop's cards send through the host; others of the same bus do not.
        let rate = |id: &str| 1.0 / among(id, 2).slowdown;
        assert_eq!((rate("RTX-4090"), rate("L40S")), (0.5, 1.0));
        let named = |name: &str| Interconnect::NAMED.iter().find(|(known, _)| *known == name).unwrap().1;
        assert_eq!(named("pcie4-p2p").all_reduce(2), AllReduce::of(part("L40S").unwrap(), 2));
        assert_eq!(named("pcie4-host").all_reduce(2), AllReduce::of(part("RTX-4090").unwrap(), 2));
        assert_eq!(named("nvlink4").all_reduce(8), AllReduce::of(part("H100-SXM-80GB").unwrap(), 8));
        assert_eq!(Interconnect::of_rate(450.0, Seconds::ZERO), named("nvlink4"));
        let late = Interconnect::of_rate(450.0, Seconds(1e-3)).all_reduce(8).unwrap();
        assert!((late.time(big).0 - among("H100-SXM-80GB", 8).time(big).0 - 1e-3).abs() < 1e-9);
        assert!(AllReduce::of(part("L4").unwrap(), 1).is_none());
        assert!(AllReduce::of(part("L4").unwrap(), 16).is_none());
    }
}
