//! Messages between a process that lends a device and one that uses it.

use super::refused;
use mixfleet_cpu::CpuBackend;
use mixfleet_hal::{Backend, Device};
use mixfleet_remote::fuzzed;
use std::sync::{Arc, LazyLock};

static DEVICE: LazyLock<Arc<dyn Device>> =
    LazyLock::new(|| CpuBackend.open("cpu@0").expect("every host has a core"));

/// A free of a buffer that there is not, which a user may send.
const HARMLESS: &[u8] = &[2, 0, 0, 0, 2, 1];

/// The first byte says which end sends the others: the user, or the process that lends.
pub(super) fn device(bytes: &[u8]) -> bool {
    let Some((end, bytes)) = bytes.split_first() else { return false };
    if end % 2 == 1 {
        return fuzzed::told(bytes).map_or_else(|error| refused(&error), |()| true);
    }
    let outcome = fuzzed::served(&**DEVICE, &fuzzed::port(), bytes);
    assert_eq!(fuzzed::served(&**DEVICE, &fuzzed::port(), HARMLESS), Ok(()), "it serves the next one");
    outcome.map_or_else(|error| refused(&error), |()| true)
}
