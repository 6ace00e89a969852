//! Time and memory of simulated devices, on a virtual clock: nothing here waits.

use crate::common;
use crate::common::{TIMEOUT, profile};
use mixfleet_hal::command::ClockKind;
use mixfleet_hal::fault::FaultPlan;
use mixfleet_hal::profile::{CopyCost, DeviceProfile, LinearSegment};
use mixfleet_hal::units::{Bytes, Seconds};
use mixfleet_hal::{
    Backend, BufferUsage, Cmd, DType, Device, DeviceKind, Error, ErrorKind, HostMemory, OpSig,
};
use mixfleet_runtime::engine::calibrate::{self, CalibrationBudget};
use mixfleet_runtime::env::SeededEnv;
use mixfleet_runtime::model::variants::tiny_variants;
use mixfleet_simulated::{
    ComputeDevice, SelectorFiles, SimBackend, SimulatedClock, TimeOnlyDevice, VirtualClock,
};
use std::sync::Arc;
use std::time::Duration;

/// Both kinds of device on one clock each.
fn both(profile: &DeviceProfile) -> [(Arc<dyn Device>, Arc<VirtualClock>); 2] {
    let (a, b) = (Arc::new(VirtualClock::default()), Arc::new(VirtualClock::default()));
    let time_only = TimeOnlyDevice::new("sim:time", profile.clone(), a.clone()).unwrap();
    let compute = ComputeDevice::new("sim:compute", profile.clone(), b.clone()).unwrap();
    [(Arc::new(time_only), a), (Arc::new(compute), b)]
}

fn gemm(device: &dyn Device, m: u32) -> Cmd {
    let (n, k, bias, accumulate) = (64, 64, false, false);
    let (x, weight, out) = (DType::Bf16, DType::Bf16, DType::Bf16);
    let sig = OpSig::Gemm { m, n, k, x, weight, out, bias, accumulate };
    let bytes = [m * k * 2, n * k * 2, m * n * 2];
    let args = bytes.map(|bytes| device.alloc(u64::from(bytes), BufferUsage::Activations).unwrap());
    Cmd::new(sig, &args).unwrap()
}

fn close(a: Seconds, b: Seconds) -> bool {
    (a.0 - b.0).abs() <= 1e-12 + 1e-9 * b.0
}

#[test]
fn a_batch_takes_what_the_profile_says_and_starts_when_the_former_ended() {
    let profile = profile();
    for (device, clock) in both(&profile) {
        let (one, two) = (gemm(&*device, 8), gemm(&*device, 4096));
        let times = [profile.batch_time([one.sig()]), profile.batch_time([one.sig(), two.sig()])];
        let mut queue = device.queue().unwrap();
        clock.wait_until(Seconds(5.0));
        let first = queue.submit(std::slice::from_ref(&one)).unwrap();
        let second = queue.submit(&[one, two]).unwrap();
        assert_eq!(clock.now(), Seconds(5.0), "submit returns at once");
        let elapsed = queue.wait(second, TIMEOUT).unwrap();
        // a ticket tells the device's time, which launching is no part of
        let work = times.map(|time| time - profile.launch);
        assert!(close(elapsed.time, work[1]) && elapsed.clock == ClockKind::Device);
        // the second was launched while the first ran
        assert!(close(clock.now(), Seconds(5.0) + times[0] + work[1]), "{:?}", clock.now());
        // an earlier ticket is done already
        assert!(close(queue.wait(first, Duration::ZERO).unwrap().time, work[0]));
        // an idle queue starts when the batch comes
        clock.wait_until(Seconds(9.0));
        let empty = queue.submit(&[]).unwrap();
        assert_eq!(queue.wait(empty, TIMEOUT).unwrap().time, Seconds::ZERO);
        assert_eq!(clock.now(), Seconds(9.0));
    }
}

#[test]
fn queues_share_the_part() {
    let profile = profile();
    for (device, clock) in both(&profile) {
        let cmds = [gemm(&*device, 64)];
        let time = profile.batch_time([cmds[0].sig()]);
        let (mut a, mut b) = (device.queue().unwrap(), device.queue().unwrap());
        let (first, second) = (a.submit(&cmds).unwrap(), b.submit(&cmds).unwrap());
        let both = time * 2.0 - profile.launch;
        b.wait(second, TIMEOUT).unwrap();
        assert!(close(clock.now(), both));
        a.wait(first, TIMEOUT).unwrap();
        assert!(close(clock.now(), both));
        assert_eq!(a.wait(mixfleet_hal::Ticket(2), TIMEOUT).unwrap_err().kind, ErrorKind::Invalid);
    }
}

#[test]
fn one_queue_copies_while_another_computes_and_what_comes_after_is_later_by_the_memorys_time() {
    let profile = DeviceProfile { launch: Seconds::ZERO, ..profile() };
    for (device, clock) in both(&profile) {
        let bytes = 1 << 10;
        let place = || device.alloc(bytes, BufferUsage::Kv).unwrap();
        let copy = [Cmd::new(OpSig::Copy { bytes }, &[place(), place()]).unwrap()];
        let work = [gemm(&*device, 1 << 14)];
        let [step_time, copy_time] = [&work, &copy].map(|cmds| profile.batch_time([cmds[0].sig()]));
        assert!(step_time > copy_time * 4.0);
        let (mut steps, mut copies) = (device.queue().unwrap(), device.queue().unwrap());
        let step = steps.submit(&work).unwrap();
        let copied = [copies.submit(&copy).unwrap(), copies.submit(&copy).unwrap()];
        copies.wait(copied[1], TIMEOUT).unwrap();
        assert!(close(clock.now(), copy_time * 2.0), "copies wait for each other, and for no step");
        steps.wait(step, TIMEOUT).unwrap();
        assert!(close(clock.now(), step_time), "the step ends when it would have");
        let next = steps.submit(&work).unwrap();
        steps.wait(next, TIMEOUT).unwrap();
        let memory_time = profile.time(copy[0].sig()).min(profile.roofline(copy[0].sig()));
        assert!(memory_time.0 > 0.0 && memory_time < copy_time, "a launch takes no memory");
        assert!(close(clock.now(), (step_time + memory_time) * 2.0), "no bandwidth comes from nowhere");
    }
}

#[test]
fn a_timeout_is_simulated_time_and_the_work_still_completes() {
    let mut profile = profile();
    profile.launch = Seconds(100.0);
    for (device, clock) in both(&profile) {
        let mut queue = device.queue().unwrap();
        let ticket = queue.submit(&[gemm(&*device, 8)]).unwrap();
        let error = queue.wait(ticket, Duration::from_secs(30)).unwrap_err();
        assert_eq!((error.kind, clock.now()), (ErrorKind::Timeout, Seconds(30.0)));
        queue.wait(ticket, Duration::from_secs(100)).unwrap();
        assert!(clock.now() >= Seconds(100.0));
    }
}

#[test]
fn a_recording_takes_the_time_of_its_batch_and_belongs_to_its_queue() {
    let profile = profile();
    for (device, clock) in both(&profile) {
        let cmds = [gemm(&*device, 8), gemm(&*device, 9)];
        let time = profile.batch_time(cmds.iter().map(Cmd::sig));
        let mut queue = device.queue().unwrap();
        let graph = queue.record(&cmds).unwrap();
        for _ in 0..2 {
            let ticket = queue.replay(&graph).unwrap();
            assert!(close(queue.wait(ticket, TIMEOUT).unwrap().time, time - profile.launch));
        }
        assert!(close(clock.now(), time * 2.0));
        assert_eq!(device.queue().unwrap().replay(&graph).unwrap_err().kind, ErrorKind::Invalid);
    }
}

#[test]
fn copies_take_what_the_profile_says() {
    let line = |fixed, rate: f64| {
        CopyCost(vec![LinearSegment {
            from: Bytes(0.0),
            fixed: Seconds(fixed),
            seconds_per_byte: 1.0 / rate,
        }])
    };
    let profile =
        DeviceProfile { host_to_device: line(1.0, 1e3), device_to_host: line(2.0, 1e2), ..profile() };
    for (device, clock) in both(&profile) {
        let slice = device.alloc(1000, BufferUsage::Staging).unwrap();
        device.write(&slice, &[7; 1000]).unwrap();
        assert!(close(clock.now(), Seconds(2.0)));
        let mut bytes = [0; 1000];
        device.read(&slice, &mut bytes).unwrap();
        assert!(close(clock.now(), Seconds(14.0)) && bytes == [7; 1000]);
        assert_eq!(device.read(&slice, &mut bytes[1..]).unwrap_err().kind, ErrorKind::Invalid);
    }
}

#[test]
fn memory_is_the_profiles_and_imports_are_used_where_they_are() {
    for (device, _) in both(&profile()) {
        assert_eq!(device.info().memory, Bytes(1e9));
        let half = device.alloc(500_000_000, BufferUsage::Kv).unwrap();
        let shard: Arc<dyn HostMemory> = Arc::new(vec![3u8; 400_000]);
        let imported = device.import(shard.clone()).unwrap();
        assert_eq!(Arc::strong_count(&shard), 2);
        // the host's own memory may be shorter still
        assert!(device.memory_free().unwrap().0 <= 499_600_000.0);
        assert_eq!(device.write(&imported.range(0, 1), &[1]).unwrap_err().kind, ErrorKind::Invalid);
        let error = device.alloc(499_600_001, BufferUsage::Kv).unwrap_err();
        assert_eq!(error.kind, ErrorKind::OutOfMemory);
        assert!(error.detail.contains("500400000 of 1000000000 in use"), "{error}");
        drop((half, imported));
        assert_eq!(Arc::strong_count(&shard), 1);
        device.alloc(1_000_000_000, BufferUsage::Kv).unwrap();
    }
}

#[test]
fn a_part_with_more_memory_than_the_host_opens() {
    let big = DeviceProfile { memory: Bytes(2e11), ..profile() };
    let device = TimeOnlyDevice::new("sim:big", big, Arc::new(VirtualClock::default())).unwrap();
    let pool = device.alloc(190_000_000_000, BufferUsage::Kv).unwrap();
    let end = pool.range(pool.bytes - 4, 4);
    device.write(&end, &[1, 2, 3, 4]).unwrap();
    let mut bytes = [0; 4];
    device.read(&end, &mut bytes).unwrap();
    assert_eq!(bytes, [1, 2, 3, 4]);
}

#[test]
fn slices_of_other_devices_are_refused() {
    let [(a, _), (b, _)] = both(&profile());
    let [(same_kind, _), _] = both(&profile());
    let slice = a.alloc(8, BufferUsage::Kv).unwrap();
    for other in [b, same_kind] {
        assert_eq!(other.write(&slice, &[0; 8]).unwrap_err().kind, ErrorKind::Invalid);
        let mut queue = other.queue().unwrap();
        let fill = Cmd::new(OpSig::Fill { bytes: 8, word: 1 }, std::slice::from_ref(&slice)).unwrap();
        let error = queue.submit(&[fill]).and_then(|ticket| queue.wait(ticket, TIMEOUT)).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Invalid, "{error}");
    }
}

#[test]
fn a_profile_that_no_device_can_have_is_refused() {
    let open = |profile| TimeOnlyDevice::new("sim:x", profile, Arc::new(VirtualClock::default())).map(drop);
    open(profile()).unwrap();
    let good = profile();
    let with = |change: &dyn Fn(&mut DeviceProfile)| {
        let mut wrong = good.clone();
        change(&mut wrong);
        open(wrong).unwrap_err().to_string()
    };
    assert!(with(&|p| p.bandwidth.0 = 0.0).contains("bandwidth of 0"));
    assert!(with(&|p| p.memory.0 = f64::NAN).contains("memory of NaN"));
    assert!(with(&|p| p.launch.0 = -1.0).contains("launch cost of -1"));
    assert!(with(&|p| p.compute[0].1.0 = f64::INFINITY).contains("f32 rate of inf"));
}

#[test]
fn a_fingerprint_follows_the_profile() {
    let info = |profile: DeviceProfile| both(&profile).map(|(device, _)| device.info().clone());
    let [time, compute] = info(profile());
    assert_eq!((time.kind, time.backend.as_str()), (DeviceKind::Simulated, "sim"));
    assert_eq!(info(profile())[0].fingerprint, time.fingerprint);
    assert_ne!(compute.fingerprint, time.fingerprint);
    assert_ne!(
        info(DeviceProfile { bandwidth: profile().bandwidth * 1.001, ..profile() })[0].fingerprint,
        time.fingerprint
    );
    let clock = time.notes.iter().find(|(what, _)| what == "clock").unwrap();
    assert_eq!(clock.1, "1 simulated second = 1 real seconds");
}

#[test]
fn calibration_finds_the_profiles_own_predictions() {
    let checkpoint = tiny_variants().remove(0).1.load().unwrap();
    let rig = common::Rig::new(&checkpoint, common::PLAIN);
    let measured = || {
        calibrate::measure(&*rig.device, &rig.forward, &SeededEnv::new(1), CalibrationBudget::WHOLE).unwrap()
    };
    let (cost, again) = (measured(), measured());
    assert_eq!(cost, again, "simulated time has no noise");
    // launches alone: per layer one of 10 us and 1 us for each of 15 to 16 commands, embedding and head
    // likewise
    let layers = f64::from(checkpoint.config.layers);
    let least = (layers + 1.0) * 10e-6;
    assert!((least..least + layers * 30e-6).contains(&cost.coefficients().decode_s.base), "{cost:?}");
}

struct NoFiles;

impl SelectorFiles for NoFiles {
    fn profile(&self, path: &str) -> mixfleet_hal::Result<DeviceProfile> {
        if path == "dir/part.json" { Ok(profile()) } else { Err(Error::invalid(format!("no file {path}"))) }
    }

    fn faults(&self, path: &str) -> mixfleet_hal::Result<FaultPlan> {
        assert_eq!(path, "plan.json");
        Ok(FaultPlan::exactly(mixfleet_hal::fault::Fault::Fail, 0, 1))
    }
}

#[test]
fn selectors_open_parts_of_the_catalog_and_files() {
    let backend = SimBackend::new(Box::new(NoFiles));
    assert!(backend.probe().unwrap_err().reason.contains("sim:rtx-4090"));
    let part = backend.open("sim:rTx-4090#2").unwrap();
    assert_eq!(part.info().id, "sim:rTx-4090#2");
    assert!((part.info().memory.0 / 1e9 - 24.0).abs() < 2.0, "{:?}", part.info().memory);
    let file = backend.open("sim:dir/part.json,dilation:4").unwrap();
    assert_eq!(file.info().memory, Bytes(1e9));
    assert!(file.info().notes.iter().any(|(_, value)| value == "1 simulated second = 4 real seconds"));
    let message = |selector: &str| backend.open(selector).err().unwrap().to_string();
    assert!(message("sim:rtx-409").contains("RTX-4090"), "{}", message("sim:rtx-409"));
    assert!(message("sim:./none.json").contains("no file ./none.json"));
    assert!(message("sim").contains("no part is named"));
}

#[test]
fn a_plan_of_faults_strikes_the_simulated_device() {
    let backend = SimBackend::new(Box::new(NoFiles));
    let device = backend.open("sim:dir/part.json,faults:plan.json,dilation:0.001").unwrap();
    let mut queue = device.queue().unwrap();
    let ticket = queue.submit(&[gemm(&*device, 8)]).unwrap();
    let error = queue.wait(ticket, TIMEOUT).unwrap_err();
    assert!(error.detail.contains("as planned"), "{error}");
}
