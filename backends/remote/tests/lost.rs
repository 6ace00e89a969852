//! Connections that end, users that leave, and callers that may not use the device.

use crate::common::{TIMEOUT, access, add, here, lend, lend_pages, open, wire};
use mixfleet_hal::{
    Backend, Buffer, BufferUsage, Cmd, Device, Elapsed, Error, ErrorKind, Graph, Queue, Result, Slice,
    Ticket, forward_device,
};
use mixfleet_remote::{DeviceAccess, RemoteDevice};
use mixfleet_wire::Security;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// A device that knows which of its buffers live.
struct Watched {
    inner: Arc<dyn Device>,
    buffers: Mutex<Vec<Weak<dyn Buffer>>>,
}

impl Watched {
    fn new() -> Arc<Self> {
        let inner = mixfleet_cpu::CpuBackend.open("cpu@0").unwrap();
        Arc::new(Watched { inner, buffers: Mutex::default() })
    }

    fn live(&self) -> usize {
        self.buffers.lock().unwrap().iter().filter(|buffer| buffer.strong_count() > 0).count()
    }

    /// Waits until this many are alive.
    fn settles_at(&self, count: usize) {
        let deadline = Instant::now() + TIMEOUT;
        while self.live() != count {
            assert!(Instant::now() < deadline, "{} buffers live", self.live());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Device for Watched {
    forward_device!(self => self.inner; info, limits, support, import, reaches, write, read, pin, queue, memory_free, health);

    fn alloc(&self, bytes: u64, role: BufferUsage) -> Result<Slice> {
        let slice = self.inner.alloc(bytes, role)?;
        self.buffers.lock().unwrap().push(Arc::downgrade(&slice.buffer));
        Ok(slice)
    }
}

fn read(device: &dyn Device, slice: &Slice) -> Result<[u8; 4]> {
    let mut bytes = [0; 4];
    device.read(&slice.range(0, 4), &mut bytes).map(|()| bytes)
}

fn run(queue: &mut dyn Queue, [a, b, to]: [&Slice; 3]) -> Result<()> {
    let ticket = queue.submit(&[add(a, b, to)])?;
    queue.wait(ticket, TIMEOUT).map(drop)
}

#[test]
fn what_a_user_had_is_freed_when_it_drops_it_and_when_it_goes() {
    let watched = Watched::new();
    let (address, crossed) = wire(lend(watched.clone()));
    let device = open(address);
    let mut slices: Vec<Slice> =
        (0..5).map(|_| device.alloc(64, BufferUsage::Activations).unwrap()).collect();
    slices.truncate(3);
    let _sends_what_is_pending = device.memory_free();
    watched.settles_at(3);
    crossed.cut(true);
    watched.settles_at(0);
    assert_eq!(device.alloc(64, BufferUsage::Kv).unwrap_err().kind, ErrorKind::DeviceLost);
}

#[test]
fn a_connection_that_ended_fails_all_until_a_queue_brings_weights_back() {
    let watched = Watched::new();
    let (address, crossed) = wire(lend(watched.clone()));
    let device = open(address);
    let placed = device.place(|device| -> Result<Slice> {
        let once = device.alloc(16, BufferUsage::Weights)?;
        let weights = device.alloc(16, BufferUsage::Weights)?;
        device.write(&once, &[1; 16])?;
        device.write(&weights, &1.5f32.to_le_bytes().repeat(4))?;
        Ok(weights)
    });
    let weights = placed.unwrap();
    let table = device.alloc(16, BufferUsage::Weights).unwrap();
    device.write(&table.range(8, 8), &2.5f32.to_le_bytes().repeat(2)).unwrap();
    device.write(&table.range(0, 8), &2.5f32.to_le_bytes().repeat(2)).unwrap();
    let to = device.alloc(16, BufferUsage::Activations).unwrap();
    let mut queue = device.queue().unwrap();
    for round in 0..3 {
        run(&mut *queue, [&weights, &table, &to]).unwrap();
        assert_eq!(f32::from_le_bytes(read(&device, &to).unwrap()), 4.0, "round {round}");
        crossed.cut(round == 1);
        for error in [
            run(&mut *queue, [&weights, &table, &to]).unwrap_err(),
            device.write(&to, &[0; 16]).and_then(|()| read(&device, &to)).unwrap_err(),
            device.alloc(16, BufferUsage::Kv).unwrap_err(),
        ] {
            assert_eq!(error.kind, ErrorKind::DeviceLost, "{error}");
        }
        if round == 1 {
            assert!(device.queue().is_err(), "no process answers");
            crossed.cut(false);
        }
        queue = device.queue().unwrap();
    }
    watched.settles_at(3);
}

#[test]
fn a_failed_batch_fails_later_ones_of_its_queue_alone() {
    let device = open(lend(mixfleet_cpu::CpuBackend.open("cpu@0").unwrap()));
    let slice = || device.alloc(16, BufferUsage::Activations).unwrap();
    let (a, b, to, table) = (slice(), slice(), slice(), slice());
    let mut queue = device.queue().unwrap();
    device.write(&a, &[255; 16]).unwrap();
    // an id that the table does not have
    let sig = mixfleet_hal::OpSig::Embed {
        tokens: 1,
        vocab: 1,
        hidden: 4,
        table: mixfleet_hal::DType::F32,
        out: mixfleet_hal::DType::F32,
    };
    let bad = mixfleet_hal::Cmd::new(sig, &[a.range(0, 4), table, to.clone()]).unwrap();
    let ticket = queue.submit_for(&[bad], std::slice::from_ref(&to)).unwrap();
    let error = queue.wait(ticket, TIMEOUT).unwrap_err();
    assert_ne!(error.kind, ErrorKind::DeviceLost, "{error}");
    assert_eq!(run(&mut *queue, [&a, &b, &to]).unwrap_err(), error);
    queue = device.queue().unwrap();
    run(&mut *queue, [&a, &b, &to]).unwrap();
}

#[test]
#[cfg(target_os = "linux")]
fn over_shared_memory_a_user_may_leave_and_another_token_is_refused_too() {
    let watched = Watched::new();
    let (address, _file) = lend_pages(watched.clone(), "lost");
    let refused = RemoteDevice::open("remote:x", address.clone(), access("another")).err().unwrap();
    assert!(refused.to_string().contains("does not have this process's token"), "{refused}");
    let device = open(address);
    let slice = || device.alloc(16, BufferUsage::Activations).unwrap();
    let (a, b, to) = (slice(), slice(), slice());
    device.write(&a, &1.5f32.to_le_bytes().repeat(4)).unwrap();
    device.write(&b, &2.5f32.to_le_bytes().repeat(4)).unwrap();
    run(&mut *device.queue().unwrap(), [&a, &b, &to]).unwrap();
    assert_eq!(f32::from_le_bytes(read(&device, &to).unwrap()), 4.0);
    watched.settles_at(3);
    drop((a, b, to, device));
    watched.settles_at(0);
}

/// A queue whose batches never end.
struct Hung;

impl Queue for Hung {
    fn submit(&mut self, _: &[Cmd]) -> Result<Ticket> {
        Ok(Ticket(1))
    }
    fn wait(&mut self, _: Ticket, timeout: Duration) -> Result<Elapsed> {
        std::thread::sleep(timeout);
        Err(Error::new(ErrorKind::Timeout, "it hangs"))
    }
    fn record(&mut self, _: &[Cmd]) -> Result<Arc<dyn Graph>> {
        Err(Error::unsupported("it hangs"))
    }
    fn replay(&mut self, _: &Arc<dyn Graph>) -> Result<Ticket> {
        Err(Error::unsupported("it hangs"))
    }
}

struct Hanging(Arc<dyn Device>);

impl Device for Hanging {
    forward_device!(self => self.0; info, limits, support, alloc, import, reaches, write, read, pin, memory_free, health);

    fn queue(&self) -> Result<Box<dyn Queue>> {
        Ok(Box::new(Hung))
    }
}

#[test]
fn a_batch_that_does_not_end_is_given_up_in_time_and_its_user_may_leave() {
    let watched = Watched::new();
    let device = open(lend(Arc::new(Hanging(watched.clone()))));
    let slice = || device.alloc(16, BufferUsage::Activations).unwrap();
    let (a, b, to) = (slice(), slice(), slice());
    let mut queue = device.queue().unwrap();
    for _ in 0..2 {
        let ticket = queue.submit(&[add(&a, &b, &to)]).unwrap();
        let error = queue.wait(ticket, Duration::from_millis(30)).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
        queue = device.queue().unwrap();
    }
    drop((queue, a, b, to, device));
    watched.settles_at(0);
}

#[test]
fn who_has_no_token_or_another_one_uses_nothing() {
    let watched = Watched::new();
    let address = lend(watched.clone());
    let error = |access: DeviceAccess| RemoteDevice::open("remote:x", address.into(), access).err().unwrap();
    assert!(error(access("another")).to_string().contains("does not have this process's token"));
    let none = || DeviceAccess { security: Security::LoopbackOnly, secret: None };
    assert!(error(none()).to_string().contains("with the token"));
    let device: Arc<dyn Device> = watched;
    assert!(mixfleet_remote::serve(&here().into(), device, none()).is_err());
}

#[test]
fn who_answers_without_the_token_is_no_device() {
    use std::io::{Read, Write};
    let listener = std::net::TcpListener::bind(here()).unwrap();
    let address = listener.local_addr().unwrap();
    let open =
        move || RemoteDevice::open("remote:x", address.into(), access("word")).err().unwrap().to_string();
    // version, and with the right one then an answer that needs no secret
    const SPOKEN: u32 = 4;
    let answers: [(u32, &str); 2] = [(SPOKEN, "another token"), (7, "version 7")];
    for (version, expected) in answers {
        let caller = std::thread::spawn(open);
        let (mut socket, _) = listener.accept().unwrap();
        let mut hello = 29u32.to_le_bytes().to_vec();
        hello.push(1);
        hello.extend(b"mixfleet");
        hello.extend(version.to_le_bytes());
        hello.extend([0; 16]);
        socket.write_all(&hello).unwrap();
        if version == SPOKEN {
            let mut length = [0; 4];
            socket.read_exact(&mut length).unwrap();
            let mut rest = vec![0; u32::from_le_bytes(length) as usize];
            socket.read_exact(&mut rest).unwrap();
            socket.write_all(&[7, 0, 0, 0, 1, 0, 4, b'n', b'o', b'n', b'e']).unwrap();
        }
        let error = caller.join().unwrap();
        assert!(error.contains(expected), "{error}");
    }
}
