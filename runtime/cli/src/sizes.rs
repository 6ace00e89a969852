//! The sizes that an instance gets, which follow from its device and its model unless they are given.

use crate::model::LoadedModel;
use anyhow::{Result, bail};
use mixfleet_hal::catalog::part_of_driver;
use mixfleet_hal::units::{Bytes, GB, GIB};
use mixfleet_hal::{Device, DeviceInfo, DeviceKind, Health};
use mixfleet_scheduler::cost::MemberShare;
use mixfleet_scheduler::sizing::{DeviceRoom, GivenSizes, InstanceSize, ridge, size};

/// KV memory if a device cannot report its free memory.
const KV_UNKNOWN: Bytes = Bytes(GIB as f64);
/// A device with less than this share of what its catalog entry says is worth a warning.
const SHARE_MIN: f64 = 0.9;
/// A clock below this share of the highest one is held down; drivers round clocks by a percent.
const CLOCK_SHARE_MIN: f64 = 0.95;

/// The size of an instance of `model` on `device`, which already has its weights, for `share` of the model.
/// Of the free memory the instance takes `taken` for another share, and `sharing` instances, itself included,
/// divide the rest equally. Logs the choice and the reason.
///
/// # Errors
/// When nothing is left for KV.
pub(crate) fn of(
    model: &LoadedModel,
    share: &MemberShare,
    device: &dyn Device,
    given: GivenSizes,
    taken: Bytes,
    sharing: usize,
) -> Result<InstanceSize> {
    let info = device.info();
    let is_host = info.kind == DeviceKind::Cpu;
    let free = device.memory_free().map(|free| Bytes((free.0 - taken.0).max(0.0) / sharing.max(1) as f64));
    let config = model.checkpoint.config.of_member(share);
    let shape = config.cost_shape(model.activations, model.kv, device.limits().kv_page_tokens);
    let mut room = DeviceRoom {
        free: free.unwrap_or(Bytes::ZERO),
        total: info.memory,
        is_host,
        ridge: part_of_driver(&info.name).and_then(|part| ridge(part, shape.weight)),
    };
    let unknown = free.is_none().then_some(KV_UNKNOWN);
    let keeps_kv = share.keeps_kv();
    let kv = if keeps_kv { given.kv.or(unknown) } else { Some(Bytes::ZERO) };
    let in_room = |room: &DeviceRoom| size(&shape, config.context_max, room, GivenSizes { kv, ..given });
    let mut size = in_room(&room);
    if !(keeps_kv && share.has_weights()) {
        // the second of two batches in flight has its own activations
        let half = size.sequences_max / 2;
        room.free.0 -= shape.activation_bytes(half, half) as f64;
        size = in_room(&room);
    }
    if keeps_kv && size.kv.0 < (shape.kv_bytes_per_token() * u64::from(shape.page_tokens)) as f64 {
        let [free, total, steps] = [room.free, room.total, size.activations].map(|bytes| bytes.0 / GB);
        bail!(
            "{}: no memory is left for KV: {free:.2} GB of {total:.2} GB are free, a tenth stays free, and steps of {} \
             tokens and {} sequences take {steps:.2} GB; lower --chunk or --sequences, use narrower dtypes or a larger \
             device, or set --kv-memory",
            info.id,
            size.step_tokens_max,
            size.sequences_max
        );
    }
    if given.kv.is_none() || given.step_tokens_max.is_none() || given.sequences_max.is_none() {
        let kv_from = match given.kv {
            _ if !keeps_kv => "others keep it".into(),
            Some(_) => "--kv-memory".into(),
            None => kv_from(&room, unknown.is_some(), &size),
        };
        say(info, &room, &kv_from, given, &size);
    }
    warn_of_less(info);
    // Cores do not report the cause of a reduced clock, and reading their health takes a part of the start.
    if !is_host {
        warn_of_clock(info, &device.health());
    }
    Ok(size)
}

fn gib(bytes: Bytes) -> f64 {
    bytes.0 / GIB as f64
}

/// Why KV memory has its size.
fn kv_from(room: &DeviceRoom, is_unknown: bool, size: &InstanceSize) -> String {
    match (is_unknown, room.is_host) {
        (true, _) => "the device does not report free memory".to_owned(),
        (false, true) => format!("a quarter of {:.1} GiB free, or what sequences can use", gib(room.free)),
        (false, false) => format!(
            "of {:.1} GiB free, less {:.1} for steps and a tenth of {:.1}, or what sequences can use",
            gib(room.free),
            gib(size.activations),
            gib(room.total)
        ),
    }
}

/// Logs the sizes with their reasons, in one line.
fn say(info: &DeviceInfo, room: &DeviceRoom, kv_from: &str, given: GivenSizes, size: &InstanceSize) {
    let step_from = match (given.step_tokens_max, room.ridge) {
        (Some(_), _) => "--chunk".to_owned(),
        (None, Some(ridge)) => format!("ridge of {ridge:.0} FLOP/B"),
        (None, None) => "the part is not in the catalog".to_owned(),
    };
    tracing::info!(
        device = %info.id,
        kv_gib = (gib(size.kv) * 10.0).round() / 10.0,
        kv_from,
        chunk = size.step_tokens_max,
        chunk_from = step_from,
        sequences = size.sequences_max,
        "sized; --kv-memory, --chunk and --sequences change it"
    );
}

/// Warns of a device that has less than its catalog entry, on which predictions from the entry are wrong.
fn warn_of_less(info: &DeviceInfo) {
    let Some(part) = part_of_driver(&info.name) else { return };
    let (has, usual) = (info.memory.0 / GB, part.memory.size_gb);
    if info.name.contains(" MIG ") || has < SHARE_MIN * usual {
        tracing::warn!(
            device = %info.id,
            memory_gb = has,
            catalog_gb = usual,
            "the device is less than the catalog's {}: a MIG slice, or memory that is reserved",
            part.id
        );
    }
}

/// Warns of a clock that is held below what the device is built for.
fn warn_of_clock(info: &DeviceInfo, health: &Health) {
    let (Some(allowed), Some(max)) = (health.clock_mhz_allowed, health.clock_mhz_max) else { return };
    if allowed < CLOCK_SHARE_MIN * max {
        tracing::warn!(
            device = %info.id,
            "the clock is limited to {allowed:.0} of {max:.0} MHz, which slows steps: reset the limit \
             ('nvidia-smi -rgc' and '-rac'), or see to power and cooling"
        );
    }
}
