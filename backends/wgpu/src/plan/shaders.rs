//! Checks, without a device, that every kernel can be written for Metal and for DX12, but those by matrices,
//! which HLSL lacks: these for Vulkan and Metal.

use super::*;
use crate::memory::testing::slices;
use mixfleet_hal::{Cmd, GroupedRows, MatrixKind};
use mixfleet_hwtests::{SuiteLevel, cases};
use naga::back::{hlsl, msl, spv};
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};
use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};
use naga::{Module, ResourceBinding, ShaderStage};
use std::collections::{BTreeMap, HashSet};
use std::result::Result;

/// A product that the suite lacks: of many rows of f16 for each expert.
const MANY_ROWS_OF_EXPERTS: OpSig = OpSig::GroupedGemm {
    grouped: GroupedRows { choices: 64, fan: 1, experts: 2, touched: 2, others: 0 },
    n: 32,
    k: 32,
    x: DType::F16,
    weight: MatrixKind::Plain(DType::F16),
    out: DType::F32,
    bias: false,
};

/// The kernels of all commands of the suite, each with its binding numbers: whole and cut, without matrices
/// and with those of both sizes.
fn kernels() -> BTreeMap<String, (Kernel, Vec<u32>)> {
    let mut kernels = BTreeMap::new();
    let whole = 1 << 27;
    let units = [MatrixUnit::new(8, 8), MatrixUnit::new(16, 32)];
    let plain = [whole, 32 << 10, 9 << 10].map(|bytes| (bytes, None));
    for (binding_bytes_max, matrices) in plain.into_iter().chain(units.map(|unit| (whole, unit))) {
        let demands = Demands { binding_bytes_max, binding_align: 64, matrices };
        let sigs = cases::cases(SuiteLevel::Full, &tests::LIMITS).into_iter().map(|case| case.sig);
        for sig in sigs.chain([MANY_ROWS_OF_EXPERTS]) {
            if !Planner::supports(demands, &sig) {
                continue;
            }
            let mut planner = Planner::new(demands);
            // what cannot be cut so small is no kernel
            if planner.add(&Cmd::new(sig, &slices(&sig, false)).unwrap()).is_err() {
                continue;
            }
            for work in planner.works {
                if let WgpuStep::Dispatch { kernel, bindings, .. } = work {
                    let numbers = bindings.iter().map(|(number, _)| *number).collect();
                    kernels.insert(format!("{kernel:?}"), (kernel, numbers));
                }
            }
        }
    }
    kernels
}

/// The kernel's text as naga understands it.
fn parsed(kernel: &Kernel, subgroups: bool) -> Result<(Module, ModuleInfo), String> {
    let source = kernel.source(subgroups);
    let module = naga::front::wgsl::parse_str(&source).map_err(|e| e.emit_to_string(&source))?;
    let subgroup = Capabilities::SUBGROUP | Capabilities::SUBGROUP_BARRIER;
    let optional = if subgroups { subgroup } else { Capabilities::empty() };
    let always = Capabilities::IMMEDIATES | Capabilities::SHADER_FLOAT16_IN_FLOAT32;
    let matrices = match kernel.matrices {
        Some(_) => Capabilities::SHADER_FLOAT16 | Capabilities::COOPERATIVE_MATRIX,
        None => Capabilities::empty(),
    };
    let info = Validator::new(ValidationFlags::all(), always | optional | matrices)
        .subgroup_stages(naga::valid::ShaderStages::COMPUTE)
        .subgroup_operations(naga::valid::SubgroupOperationSet::all())
        .validate(&module)
        .map_err(|e| e.emit_to_string(&source))?;
    Ok((module, info))
}

/// The kernel in MSL of a version, with the options that wgpu gives for it.
fn in_msl(
    module: &Module,
    info: &ModuleInfo,
    kernel: &Kernel,
    numbers: &[u32],
    lang_version: (u8, u8),
) -> Result<String, String> {
    let mut resources =
        msl::EntryPointResources { immediates_buffer: Some(0), sizes_buffer: Some(1), ..Default::default() };
    for (&binding, slot) in numbers.iter().zip(2..) {
        let target =
            msl::BindTarget { buffer: Some(slot), mutable: binding >= OUTPUTS, ..Default::default() };
        resources.resources.insert(ResourceBinding { group: 0, binding }, target);
    }
    let unchecked = BoundsCheckPolicy::Unchecked;
    let options = msl::Options {
        lang_version,
        per_entry_point_map: [(kernel.entry.to_owned(), resources)].into(),
        fake_missing_bindings: false,
        bounds_check_policies: BoundsCheckPolicies {
            index: unchecked,
            buffer: unchecked,
            image_load: unchecked,
            binding_array: unchecked,
        },
        zero_initialize_workgroup_memory: false,
        force_loop_bounding: false,
        emit_int_div_checks: false,
        ..Default::default()
    };
    let pipeline = msl::PipelineOptions {
        entry_point: Some((ShaderStage::Compute, kernel.entry.to_owned())),
        ..Default::default()
    };
    let written = msl::write_string(module, info, &options, &pipeline).map_err(|e| e.to_string())?;
    let (text, translated) = written;
    let names = translated.entry_point_names;
    match names.as_slice() {
        [Ok(name)] if text.contains(name.as_str()) => Ok(text),
        _ => Err(format!("entry points {names:?}")),
    }
}

/// The kernel in HLSL for a shader model, with the options that wgpu gives for it.
fn in_hlsl(
    module: &Module,
    info: &ModuleInfo,
    kernel: &Kernel,
    numbers: &[u32],
    shader_model: hlsl::ShaderModel,
) -> Result<String, String> {
    let target = |register| hlsl::BindTarget { register, ..Default::default() };
    let binding_map =
        numbers.iter().map(|&binding| (ResourceBinding { group: 0, binding }, target(binding))).collect();
    let options = hlsl::Options {
        shader_model,
        binding_map,
        fake_missing_bindings: false,
        immediates_target: Some(target(0)),
        zero_initialize_workgroup_memory: false,
        restrict_indexing: false,
        force_loop_bounding: false,
        ..Default::default()
    };
    let pipeline =
        hlsl::PipelineOptions { entry_point: Some((ShaderStage::Compute, kernel.entry.to_owned())) };
    let mut text = String::new();
    let written = hlsl::Writer::new(&mut text, &options, &pipeline).write(module, info, None);
    let names = written.map_err(|e| e.to_string())?.entry_point_names;
    match names.as_slice() {
        [Ok(name)] if text.contains(name.as_str()) => Ok(text),
        _ => Err(format!("entry points {names:?}")),
    }
}

/// The kernel in SPIR-V as Vulkan 1.3 takes it.
fn in_spirv(module: &Module, info: &ModuleInfo, kernel: &Kernel, numbers: &[u32]) -> Result<String, String> {
    let binding = |&binding: &u32| {
        let at = spv::BindingInfo { descriptor_set: 0, binding, binding_array_size: None };
        (ResourceBinding { group: 0, binding }, at)
    };
    let options = spv::Options {
        lang_version: (1, 6),
        binding_map: numbers.iter().map(binding).collect(),
        force_loop_bounding: false,
        ..Default::default()
    };
    let pipeline =
        spv::PipelineOptions { shader_stage: ShaderStage::Compute, entry_point: kernel.entry.to_owned() };
    let words = spv::write_vec(module, info, &options, Some(&pipeline)).map_err(|e| e.to_string())?;
    Ok(format!("{} words", words.len()))
}

#[test]
fn every_kernel_can_be_written_for_metal_and_for_dx12() {
    let kernels = kernels();
    let files: HashSet<_> = kernels.values().map(|(kernel, _)| kernel.file).collect();
    assert_eq!(files.len(), ShaderFile::ALL.len(), "the suite does not use every file: {files:?}");
    let by_matrices = kernels.values().filter(|(kernel, _)| kernel.matrices.is_some());
    let by_matrices: HashSet<_> =
        by_matrices.map(|(kernel, _)| (kernel.file, kernel.matrices.map(|unit| unit.edge))).collect();
    assert_eq!(by_matrices.len(), 4, "plain and expert products, of both sizes: {by_matrices:?}");
    assert!(!hlsl::supported_capabilities().contains(Capabilities::COOPERATIVE_MATRIX));
    let (mut refused, mut texts) = (Vec::new(), 0);
    for (name, (kernel, numbers)) in &kernels {
        for subgroups in [false, true] {
            if kernel.matrices.is_some() && !subgroups {
                continue;
            }
            let (module, info) = match parsed(kernel, subgroups) {
                Ok(valid) => valid,
                Err(error) => {
                    refused.push(format!("{name}, subgroups: {subgroups}: WGSL: {error}"));
                    continue;
                }
            };
            // FXC has shader model 5.1, which lacks subgroups
            let models = match (kernel.matrices, subgroups) {
                (Some(_), _) => vec![],
                (None, false) => vec![hlsl::ShaderModel::V5_1, hlsl::ShaderModel::V6_0],
                (None, true) => vec![hlsl::ShaderModel::V6_0],
            };
            // matrices come with MSL 2.3
            let oldest = if kernel.matrices.is_some() { (2, 3) } else { (2, 1) };
            let msl = [oldest, (3, 0)].map(|version| in_msl(&module, &info, kernel, numbers, version));
            let hlsl = models.into_iter().map(|model| in_hlsl(&module, &info, kernel, numbers, model));
            let spirv = kernel.matrices.map(|_| in_spirv(&module, &info, kernel, numbers));
            for written in msl.into_iter().chain(hlsl).chain(spirv) {
                match written {
                    Ok(_) => texts += 1,
                    Err(error) => refused.push(format!("{name}, subgroups: {subgroups}: {error}")),
                }
            }
        }
    }
    eprintln!("{} kernels, {texts} texts", kernels.len());
    assert!(refused.is_empty(), "{} refused:\n{}", refused.len(), refused.join("\n"));
}
