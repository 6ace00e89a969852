//! Measuring the cost of a link for the pieces of a hand-off.

use super::courier::{HandOffLimits, Links};
use crate::env::SharedEnv;
use mixfleet_hal::cast::{low_u8, to_usize};
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::{Endpoint, Piece, RemoteAccess};
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Error, Result};
use mixfleet_scheduler::cost::LinkCost;

/// Timed writes of each size, on however slow a link.
const WRITES_MIN: usize = 5;

/// Time limit for preparing slots, since the first write to a slot allocates its pages at both ends. At least
/// one slot is prepared.
const PREPARE_S_MAX: f64 = 0.025;
/// Time limit for starting large writes to prepared slots; at least `WRITES_MIN` of them are timed.
const LARGE_S_MAX: f64 = 0.04;

const SMALL_BYTES: u64 = 4096;

/// Measures the first transport within this process.
pub(super) fn measure_link(env: &SharedEnv, links: &Links, limits: HandOffLimits) -> Result<LinkCost> {
    let transport = links.transports.first().ok_or_else(|| Error::unsupported("there is no transport"))?;
    let region = transport.register((links.make_region)(limits.region_bytes())?, RemoteAccess::Write)?;
    let outbox = (links.make_region)(limits.region_bytes())?;
    let measured = transport
        .connect(outbox.clone(), &region)
        .and_then(|mut endpoint| time_writes(&|| env.now(), &mut *endpoint, &*outbox, limits));
    transport.deregister(&region)?;
    measured
}

/// Fits `a + b * bytes` of a staged write to the shortest time of a small write and the median of one that
/// fills a slot. The slots of `outbox`, from which `endpoint` sends, take turns, and each piece is written to
/// its slot just before, as for real KV: a single piece would stay in the caches, and would be sent several
/// times faster.
pub(crate) fn time_writes(
    now: &dyn Fn() -> Seconds,
    endpoint: &mut dyn Endpoint,
    outbox: &dyn SharedMemory,
    limits: HandOffLimits,
) -> Result<LinkCost> {
    let slot_bytes = limits.slot_bytes.min(outbox.size_bytes()).max(1);
    let slots = outbox.size_bytes() / slot_bytes;
    let small_bytes = SMALL_BYTES.min(slot_bytes);
    let mut timed = |bytes: u64, slot: u64| -> Result<f64> {
        let offset = slot * slot_bytes;
        outbox.update(offset, bytes, &mut |piece| piece.fill(low_u8(slot)))?;
        let start = now();
        let transfer = endpoint.write(&[Piece { local: offset, remote: offset, bytes }])?;
        endpoint.wait(transfer, limits.timeout)?;
        Ok((now() - start).0)
    };
    let (start, mut prepared) = (now(), 0);
    while prepared == 0 || (prepared < slots && (now() - start).0 < PREPARE_S_MAX) {
        timed(slot_bytes, prepared)?;
        prepared += 1;
    }
    let (mut large, mut small) = (Vec::new(), f64::INFINITY);
    for slot in (0..prepared).cycle().take(WRITES_MIN.max(to_usize(prepared))) {
        if large.len() >= WRITES_MIN && (now() - start).0 >= LARGE_S_MAX {
            break;
        }
        large.push(timed(slot_bytes, slot)?);
    }
    for slot in (0..prepared).cycle().take(WRITES_MIN) {
        small = small.min(timed(small_bytes, slot)?);
    }
    let large = median(&mut large);
    let more_bytes = (slot_bytes - small_bytes).max(1);
    let seconds_per_byte = ((large - small) / more_bytes as f64).max(0.0);
    Ok(LinkCost { latency: Seconds(small), seconds_per_byte, usd_per_byte: 0.0 })
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::transport::TransferId;
    use mixfleet_wire::HostRegion;
    use std::sync::Mutex;
    use std::time::Duration;

    const SLOTS: usize = 32;
    const LIMITS: HandOffLimits =
        HandOffLimits { slot_bytes: 1 << 16, slots: SLOTS as u32, timeout: Duration::from_secs(5) };
    const LATENCY_S: f64 = 1e-5;

    const MEMORY_BYTES_PER_S: f64 = 10e9;

    /// Between memories behind a cache that holds half of the slots, which get their pages when they are
    /// written to.
    struct Slow {
        bytes_per_s: f64,
        clock: Mutex<f64>,
        /// Slots that were written in full, in this order.
        written: Mutex<Vec<u64>>,
    }

    impl Slow {
        fn at(bytes_per_s: f64) -> Self {
            Slow { bytes_per_s, clock: Mutex::new(0.0), written: Mutex::default() }
        }

        fn now(&self) -> Seconds {
            Seconds(*self.clock.lock().unwrap())
        }

        fn measure(&self) -> LinkCost {
            let outbox = HostRegion::new(LIMITS.region_bytes() as usize).unwrap();
            time_writes(&|| self.now(), &mut &*self, &outbox, LIMITS).unwrap()
        }
    }

    impl Endpoint for &Slow {
        fn write(&mut self, pieces: &[Piece]) -> Result<TransferId> {
            let mut written = self.written.lock().unwrap();
            for &Piece { local, remote, bytes } in pieces {
                assert_eq!(local, remote);
                let mut memory_s = bytes as f64 / MEMORY_BYTES_PER_S;
                if bytes == LIMITS.slot_bytes {
                    let slot = remote / LIMITS.slot_bytes;
                    let before = written.iter().rev().position(|&earlier| earlier == slot);
                    memory_s *= match before {
                        None => 3.0,
                        Some(others) if others < SLOTS / 2 => 0.1,
                        Some(_) => 1.0,
                    };
                    written.push(slot);
                }
                *self.clock.lock().unwrap() += LATENCY_S + memory_s.max(bytes as f64 / self.bytes_per_s);
            }
            Ok(TransferId(0))
        }

        fn read(&mut self, _: &[Piece]) -> Result<TransferId> {
            Err(Error::unsupported("only written to"))
        }

        fn wait(&mut self, _: TransferId, _: Duration) -> Result<()> {
            Ok(())
        }

        fn cancel(&mut self, _: TransferId) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn neither_caches_nor_the_first_touch_are_taken_for_the_link() {
        let link = Slow::at(f64::INFINITY);
        let cost = link.measure();
        assert!((cost.seconds_per_byte * MEMORY_BYTES_PER_S - 1.0).abs() < 1e-6, "{cost:?}");
        assert!(
            (cost.latency.0 - LATENCY_S - SMALL_BYTES as f64 / MEMORY_BYTES_PER_S).abs() < 1e-12,
            "{cost:?}"
        );
        assert_eq!(link.written.lock().unwrap().len(), 2 * SLOTS);
        assert!(link.now().0 < LARGE_S_MAX);
    }

    #[test]
    fn a_slow_link_carries_few_pieces() {
        let link = Slow::at(1e6);
        let cost = link.measure();
        assert!((cost.seconds_per_byte * 1e6 - 1.0).abs() < 1e-3, "{cost:?}");
        assert_eq!(*link.written.lock().unwrap(), [0; 6]);
    }

    #[test]
    fn less_memory_than_a_slot_is_measured_too() {
        let link = Slow::at(1e9);
        for bytes in [1, 5000] {
            let outbox = HostRegion::new(bytes).unwrap();
            let cost = time_writes(&|| link.now(), &mut &link, &outbox, LIMITS).unwrap();
            assert!(cost.latency.0 >= LATENCY_S && cost.seconds_per_byte.is_finite(), "{bytes}: {cost:?}");
        }
    }
}
