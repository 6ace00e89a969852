//! What crosses, and when.

use crate::common::{TIMEOUT, add, lend, open, wire};
use mixfleet_hal::{Backend, BufferUsage, Device, Slice};

const ELEMENTS: usize = 4096;
const BYTES: u64 = 4 * ELEMENTS as u64;

fn place(device: &dyn Device, value: f32) -> Slice {
    let slice = device.alloc(BYTES, BufferUsage::Activations).unwrap();
    device.write(&slice, &bytes(value)).unwrap();
    slice
}

fn bytes(value: f32) -> Vec<u8> {
    value.to_le_bytes().repeat(ELEMENTS)
}

fn read(device: &dyn Device, slice: &Slice) -> Vec<u8> {
    let mut all = vec![0; slice.bytes as usize];
    device.read(slice, &mut all).unwrap();
    all
}

#[test]
fn a_batch_takes_one_way_there_and_one_way_back() {
    let (address, crossed) = wire(lend(mixfleet_cpu::CpuBackend.open("cpu@0").unwrap()));
    let device = open(address);
    let [a, b, to] = [1.0, 2.0, 0.0].map(|value| place(&device, value));
    let mut queue = device.queue().unwrap();
    let before = crossed.bytes();
    device.write(&a, &bytes(5.0)).unwrap();
    let ticket = queue.submit_for(&[add(&a, &b, &to)], std::slice::from_ref(&to)).unwrap();
    queue.wait(ticket, TIMEOUT).unwrap();
    let (out, back) = crossed.bytes();
    // 4 bytes and a kind before a message, numbers of a byte or two
    assert!((BYTES..BYTES + 48).contains(&(out - before.0)), "{} bytes out", out - before.0);
    assert!((BYTES..BYTES + 24).contains(&(back - before.1)), "{} bytes back", back - before.1);
    assert_eq!(read(&device, &to), bytes(7.0));
    assert_eq!(crossed.bytes(), (out, back), "the result was there already");
    // a result is read once; the next reader sends a request
    assert_eq!(read(&device, &to), bytes(7.0));
    assert!(crossed.bytes().1 >= back + BYTES);
}

#[test]
fn a_result_that_something_writes_to_later_is_not_what_came_before() {
    let device = open(lend(mixfleet_cpu::CpuBackend.open("cpu@0").unwrap()));
    let [a, b, to] = [1.0, 2.0, 0.0].map(|value| place(&device, value));
    let mut queue = device.queue().unwrap();
    let results = [to.range(0, 64), to.range(BYTES - 64, 64)];
    let first = queue.submit_for(&[add(&a, &b, &to)], &results).unwrap();
    queue.wait(first, TIMEOUT).unwrap();
    device.write(&to.range(0, 64), &bytes(9.0)[..64]).unwrap();
    assert_eq!(read(&device, &results[0]), bytes(9.0)[..64]);
    assert_eq!(read(&device, &results[1]), bytes(3.0)[..64]);

    // two in flight: what the second writes is the second's
    let first = queue.submit_for(&[add(&a, &b, &to)], &results).unwrap();
    let second = queue.submit(&[add(&a, &a, &to)]).unwrap();
    queue.wait(first, TIMEOUT).unwrap();
    queue.wait(second, TIMEOUT).unwrap();
    assert_eq!(read(&device, &results[0]), bytes(2.0)[..64]);

    // a recorded batch
    let graph = queue.record(&[add(&b, &b, &to)]).unwrap();
    let first = queue.submit_for(&[add(&a, &b, &to)], &results).unwrap();
    queue.wait(first, TIMEOUT).unwrap();
    let again = queue.replay(&graph).unwrap();
    queue.wait(again, TIMEOUT).unwrap();
    assert_eq!(read(&device, &results[1]), bytes(4.0)[..64]);
}

#[test]
fn writes_and_reads_of_any_length_arrive() {
    let device = open(lend(mixfleet_cpu::CpuBackend.open("cpu@0").unwrap()));
    for bytes in [1, 4095, 8192, 8193, 70_000, (8 << 20) + 17] {
        let slice = device.alloc(bytes as u64, BufferUsage::Staging).unwrap();
        let data: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
        device.write(&slice, &data).unwrap();
        assert!(read(&device, &slice) == data, "{bytes} bytes");
    }
}
