//! A device at every instruction level, random operands, and error bounds.

#![allow(unreachable_pub, reason = "a module of test binaries")]
#![allow(dead_code, reason = "not every test file uses all of it")]

pub mod reference;

use mixfleet_cpu::{CpuBackend, isa::Isa};
use mixfleet_hal::random::Stream;
use mixfleet_hal::{BufferUsage, Cmd, DType, Device, OpSig, OperandAccess, Result, Slice};
use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

/// Longer than any test's work; a hang fails instead of blocking.
pub const LONG: Duration = Duration::from_secs(120);

/// One device with its level.
pub struct Rig {
    pub device: Arc<dyn Device>,
    pub isa: Isa,
    stream: RefCell<Stream>,
}

/// `selector` at every level that this processor has.
pub fn levels(selector: &str) -> Vec<Rig> {
    let open = |isa| Rig {
        device: CpuBackend.open_at(selector, isa).unwrap(),
        isa,
        stream: RefCell::new(Stream::new(7)),
    };
    Isa::available().into_iter().map(open).collect()
}

/// Elements as f64.
pub fn f64s(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    dtype.decode(bytes)
}

impl Rig {
    /// `count` normal values, rounded to `dtype`.
    pub fn random(&self, dtype: DType, count: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        for _ in 0..count {
            dtype.encode(self.stream.borrow_mut().next_normal(), &mut bytes);
        }
        bytes
    }

    /// Indices as bytes.
    pub fn u32s(&self, values: &[u32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    /// A number below `bound`.
    pub fn below(&self, bound: u64) -> u64 {
        self.stream.borrow_mut().below(bound)
    }

    /// A slice that holds `data`, between sentinels, at an odd element offset.
    pub fn upload(&self, dtype: DType, data: &[u8]) -> Slice {
        let margin = 3 * dtype.size_bytes();
        let whole = self.device.alloc(data.len() as u64 + 2 * margin, BufferUsage::Activations).unwrap();
        self.device.write(&whole, &vec![0xA5; whole.bytes as usize]).unwrap();
        let slice = whole.range(margin, data.len() as u64);
        self.device.write(&slice, data).unwrap();
        slice
    }

    /// Runs one operation on copies of `operands` and returns all operands afterwards. Checks that the memory
    /// around them and the read-only operands did not change.
    pub fn run(&self, sig: &OpSig, operands: &[Vec<u8>]) -> Result<Vec<Vec<u8>>> {
        let kinds = sig.operands();
        let slices: Vec<Slice> =
            kinds.iter().zip(operands).map(|(o, data)| self.upload(o.dtype, data)).collect();
        let mut queue = self.device.queue()?;
        let ticket = queue.submit(&[Cmd::new(*sig, &slices)?])?;
        queue.wait(ticket, LONG)?;
        let mut results = Vec::new();
        for ((kind, slice), before) in kinds.iter().zip(&slices).zip(operands) {
            let mut all = vec![0; slice.buffer.size_bytes() as usize];
            self.device.read(&Slice::whole(slice.buffer.clone()), &mut all)?;
            let (head, rest) = all.split_at(slice.offset as usize);
            let (data, tail) = rest.split_at(slice.bytes as usize);
            let intact = head.iter().chain(tail).all(|&b| b == 0xA5);
            assert!(intact, "{}: {sig:?} wrote beside operand '{}'", self.isa, kind.name);
            assert!(
                kind.access != OperandAccess::Read || data == before,
                "{}: {sig:?} wrote '{}'",
                self.isa,
                kind.name
            );
            results.push(data.to_vec());
        }
        Ok(results)
    }
}

/// A-priori error bounds (Higham 2002, ch. 3).
pub mod bound {
    use mixfleet_hal::DType;

    /// Unit round-off of the arithmetic.
    pub const F32: f64 = 1.0 / (1u64 << 24) as f64;

    /// Of a sum of products in f32, in any order. Twice the usual, as `vdpbf16ps` rounds each product's
    /// sum and flushes subnormals.
    pub fn sum(terms: &[f64]) -> f64 {
        let magnitude: f64 = terms.iter().map(|t| t.abs()).sum();
        2.0 * (terms.len() as f64 + 1.0) * F32 * magnitude + 1e-37
    }

    /// Of rounding `value` to `dtype`, with its subnormals.
    pub fn round(dtype: DType, value: f64) -> f64 {
        let smallest = match dtype {
            DType::F16 => 2f64.powi(-25),
            _ => 1e-37,
        };
        dtype.unit_roundoff() * value.abs() * 1.001 + smallest
    }
}
