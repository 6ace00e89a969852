//! Queues and memory: what the conformance suite takes for granted.
#![cfg(feature = "opencl")]

use mixfleet_hal::{Backend, BufferUsage, Cmd, DType, Device, Error, ErrorKind, HostMemory, OpSig, Result};
use mixfleet_hwtests::reference::ReferenceDevice;
use mixfleet_opencl::OpenClBackend;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(600);

fn device() -> Option<Arc<dyn Device>> {
    match OpenClBackend.probe() {
        Ok(_) => Some(OpenClBackend.open("opencl").unwrap()),
        Err(absent) => {
            eprintln!("SKIPPED: no OpenCL device: {absent}");
            None
        }
    }
}

#[test]
fn imported_and_foreign_memory_is_not_written() {
    let Some(device) = device() else { return };
    let own = device.alloc(64, BufferUsage::Activations).unwrap();
    let foreign = ReferenceDevice::default().alloc(64, BufferUsage::Activations).unwrap();
    assert_eq!(device.write(&foreign, &[0; 64]).unwrap_err().kind, ErrorKind::Invalid);
    let mut queue = device.queue().unwrap();
    let copy = |from, to| Cmd::new(OpSig::Copy { bytes: 64 }, &[from, to]).unwrap();
    let error = queue.submit(&[copy(own.clone(), foreign)]).unwrap_err();
    assert!(error.detail.contains("another device"), "{error}");
    if device.limits().imports_host_memory {
        let host = Arc::new(vec![7u8; 64]);
        let imported = device.import(host.clone()).unwrap();
        assert_eq!(device.write(&imported, &[0; 64]).unwrap_err().kind, ErrorKind::Invalid);
        assert!(queue.submit(&[copy(own.clone(), imported.clone())]).is_err());
        // a refused batch was never begun: the queue goes on
        let ticket = queue.submit(&[copy(imported, own.clone())]).unwrap();
        queue.wait(ticket, LONG).unwrap();
        let mut got = [0; 64];
        device.read(&own, &mut got).unwrap();
        assert_eq!(got, [7; 64]);
        assert_eq!(*host, vec![7u8; 64]);
    }
}

/// Host memory that reports lost bytes once a flag is set.
#[derive(Debug)]
struct Losing(Vec<u8>, AtomicBool);

impl HostMemory for Losing {
    fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    fn check(&self) -> Result<()> {
        match self.1.load(Ordering::SeqCst) {
            true => Err(Error::new(ErrorKind::DeviceLost, "lost bytes")),
            false => Ok(()),
        }
    }
}

#[test]
fn a_batch_that_may_have_read_lost_host_memory_fails_and_so_do_those_after_it() {
    let Some(device) = device() else { return };
    if !device.limits().imports_host_memory {
        return;
    }
    let host = Arc::new(Losing(vec![7; 64], AtomicBool::new(false)));
    let (imported, own) =
        (device.import(host.clone()).unwrap(), device.alloc(64, BufferUsage::Activations).unwrap());
    let copy = [Cmd::new(OpSig::Copy { bytes: 64 }, &[imported, own]).unwrap()];
    let mut queue = device.queue().unwrap();
    let ticket = queue.submit(&copy).unwrap();
    queue.wait(ticket, LONG).unwrap();
    host.1.store(true, Ordering::SeqCst);
    let ticket = queue.submit(&copy).unwrap();
    for _ in 0..2 {
        let error = queue.wait(ticket, LONG).unwrap_err();
        assert_eq!((error.kind, error.detail.as_str()), (ErrorKind::DeviceLost, "lost bytes"));
    }
    assert!(queue.submit(&copy).and_then(|ticket| queue.wait(ticket, LONG)).is_err());
}

#[test]
fn a_wait_that_is_over_can_be_repeated() {
    let Some(device) = device() else { return };
    let f32s = DType::F32;
    let sig = OpSig::Gemm {
        m: 256,
        n: 512,
        k: 512,
        x: f32s,
        weight: f32s,
        out: f32s,
        bias: false,
        accumulate: false,
    };
    let alloc = |elements: u64| device.alloc(elements * 4, BufferUsage::Activations).unwrap();
    let cmd = Cmd::new(sig, &[alloc(256 * 512), alloc(512 * 512), alloc(256 * 512)]).unwrap();
    let mut queue = device.queue().unwrap();
    let graph = queue.record(std::slice::from_ref(&cmd)).unwrap();
    let tickets: Vec<_> = (0..20).map(|_| queue.replay(&graph).unwrap()).collect();
    let last = tickets[tickets.len() - 1];
    if let Err(error) = queue.wait(last, Duration::ZERO) {
        assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
    }
    let once = queue.wait(last, LONG).unwrap();
    assert!(once.time.0 > 0.0);
    assert_eq!(queue.wait(last, Duration::ZERO).unwrap(), once);
    assert!(queue.wait(tickets[3], LONG).is_ok());
    let empty = queue.submit(&[]).unwrap();
    assert_eq!(queue.wait(empty, LONG).unwrap().time.0, 0.0);
    let unknown = mixfleet_hal::Ticket(empty.0 + 1);
    assert_eq!(queue.wait(unknown, LONG).unwrap_err().kind, ErrorKind::Invalid);
}

#[test]
fn queues_on_several_threads_do_not_disturb_each_other() {
    let Some(device) = device() else { return };
    let work = |word: u32| {
        let mut queue = device.queue().unwrap();
        let (a, b) =
            (device.alloc(4096, BufferUsage::Kv).unwrap(), device.alloc(4096, BufferUsage::Kv).unwrap());
        for round in 0..50 {
            let word = word * 1000 + round;
            let fill = Cmd::new(OpSig::Fill { bytes: 4096, word }, std::slice::from_ref(&a)).unwrap();
            let copy = Cmd::new(OpSig::Copy { bytes: 4096 }, &[a.clone(), b.clone()]).unwrap();
            let ticket = queue.submit(&[fill, copy]).unwrap();
            queue.wait(ticket, LONG).unwrap();
            let mut got = vec![0; 4096];
            device.read(&b, &mut got).unwrap();
            assert_eq!(got, word.to_le_bytes().repeat(1024));
        }
    };
    std::thread::scope(|scope| (1..=4).for_each(|word| drop(scope.spawn(move || work(word)))));
}

#[test]
fn more_than_the_device_has_is_out_of_memory() {
    let Some(device) = device() else { return };
    let too_much = device.limits().allocation_bytes_max + 1;
    assert_eq!(device.alloc(too_much, BufferUsage::Kv).unwrap_err().kind, ErrorKind::OutOfMemory);
}
