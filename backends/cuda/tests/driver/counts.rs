//! Calls of the driver for a step of a model, by name: what the host costs the device.

use super::{LONG, with_fake_driver};
use mixfleet_hal::op::Extent;
use mixfleet_hal::{BufferUsage, Cmd, DType, Device, KvShape, OpSig, Scalar, Slice};
use std::collections::BTreeMap;
use std::sync::Arc;

pub(super) type Calls = BTreeMap<String, u64>;

/// The calls of one of the libraries so far.
pub(super) fn calls(library: &str) -> Calls {
    let mut text = vec![0u8; 1 << 16];
    // SAFETY: the library is the one that the backend loaded; the function writes at most `count` bytes.
    unsafe {
        let library = libloading::Library::new(library).unwrap();
        let told: libloading::Symbol<unsafe extern "C" fn(*mut u8, usize) -> i32> =
            library.get(b"fake_calls").unwrap();
        assert_eq!(told(text.as_mut_ptr(), text.len()), 0);
    }
    let text = String::from_utf8(text.into_iter().take_while(|&byte| byte != 0).collect()).unwrap();
    let pair = |line: &str| {
        let (name, count) = line.split_once(' ').unwrap();
        (name.to_owned(), count.parse().unwrap())
    };
    text.lines().map(pair).collect()
}

/// What `work` calls in the driver.
pub(super) fn calls_of(work: impl FnOnce()) -> Calls {
    let before = calls("libcuda.so.1");
    work();
    let now = calls("libcuda.so.1").into_iter();
    now.map(|(name, count)| (name.clone(), count - before.get(&name).unwrap_or(&0)))
        .filter(|(_, count)| *count > 0)
        .collect()
}

pub(super) fn count(calls: &Calls, name: &str) -> u64 {
    calls.get(name).copied().unwrap_or(0)
}

/// However many layers a model has.
const CALLS_OF_A_DECODE_STEP_MAX: u64 = 10;

const LAYERS: usize = 4;
const HIDDEN: u32 = 128;
const KV: KvShape = KvShape { kv_heads: 2, head_dim: 64, page_tokens: 16, dtype: DType::Bf16, latent: None };

fn gemm(m: u32, n: u32, out: DType, accumulate: bool) -> OpSig {
    OpSig::Gemm { m, n, k: HIDDEN, x: DType::Bf16, weight: DType::Bf16, out, bias: false, accumulate }
}

/// The operations of a layer over `tokens` rows: `decodes` decode rows, the rest one prompt.
fn layer(tokens: u32, decodes: u32) -> Vec<OpSig> {
    let (x, heads) = (DType::Bf16, HIDDEN / KV.head_dim);
    let norm =
        OpSig::RmsNorm { rows: tokens, cols: HIDDEN, eps: Scalar(1e-5), x: DType::F32, weight: x, out: x };
    let mut sigs = vec![norm];
    sigs.extend([gemm(tokens, HIDDEN, x, false); 3]);
    sigs.extend([OpSig::Rope { tokens, heads, head_dim: KV.head_dim, x, part: None }; 2]);
    sigs.push(OpSig::KvWrite { tokens, x, kv: KV });
    if decodes > 0 {
        let kv_tokens = u64::from(decodes) * 100;
        sigs.push(OpSig::AttnDecode {
            sequences: decodes,
            kv_tokens,
            heads,
            pages_max: 8,
            x,
            kv: KV,
            cap: None,
        });
        sigs.push(OpSig::AttnMerge {
            parts: 1,
            rows: decodes * heads,
            head_dim: KV.head_dim,
            sinks: 0,
            out: x,
        });
    }
    if tokens > decodes {
        sigs.push(OpSig::AttnPrefill {
            tokens: tokens - decodes,
            sequences: 1,
            pairs: 100,
            kv_tokens: 100,
            heads,
            pages_max: 8,
            window: None,
            sinks: false,
            x,
            kv: KV,
            cap: None,
        });
    }
    sigs.extend([gemm(tokens, HIDDEN, DType::F32, true), norm]);
    sigs.extend([gemm(tokens, HIDDEN, x, false); 2]);
    sigs.push(OpSig::SiluMul { elements: u64::from(tokens * HIDDEN), x });
    sigs.push(gemm(tokens, HIDDEN, DType::F32, true));
    sigs
}

/// A command on zeroed operands.
pub(super) fn command(device: &dyn Device, sig: OpSig) -> Cmd {
    let slices: Vec<Slice> = sig
        .operands()
        .iter()
        .map(|operand| {
            let elements = match operand.extent {
                Extent::Exactly(n) => n,
                Extent::PagesOf(page) => 8 * page,
            };
            let bytes = elements * operand.dtype.size_bytes();
            let slice = device.alloc(bytes, BufferUsage::Activations).unwrap();
            device.write(&slice, &vec![0; bytes as usize]).unwrap();
            slice
        })
        .collect();
    Cmd::new(sig, &slices).unwrap()
}

fn commands(device: &dyn Device, sigs: &[OpSig]) -> Vec<Cmd> {
    sigs.iter().map(|&sig| command(device, sig)).collect()
}

/// Inputs of a step and the tokens that it draws, as the engine places them.
fn inputs_and_tokens(device: &dyn Device) -> [Slice; 2] {
    [4096, 16].map(|bytes| device.alloc(bytes, BufferUsage::Staging).unwrap())
}

#[test]
fn a_decode_step_is_one_launch_of_a_graph() {
    with_fake_driver("counts::a_decode_step_is_one_launch_of_a_graph", |device: Arc<dyn Device>| {
        let mut queue = device.queue().unwrap();
        let [inputs, tokens] = inputs_and_tokens(&*device);
        let sigs: Vec<OpSig> = (0..LAYERS).flat_map(|_| layer(4, 4)).collect();
        let mut list = commands(&*device, &sigs);
        list.push(Cmd::new(OpSig::Copy { bytes: 16 }, &[inputs.range(0, 16), tokens.clone()]).unwrap());
        let graph = queue.record(&list).unwrap();
        let mut step = |first: u8| {
            device.write(&inputs, &[first; 4096]).unwrap();
            let ticket = queue.replay(&graph).unwrap();
            queue.wait(ticket, LONG).unwrap();
            let mut drawn = [0; 16];
            device.read(&tokens, &mut drawn).unwrap();
            assert_eq!(drawn, [first; 16]);
        };
        // the first steps create what later ones use again
        step(1);
        step(2);
        for first in 3..6 {
            let compiled = calls("libnvrtc.so.13");
            let calls_made = calls_of(|| step(first));
            eprintln!("decode step: {} calls, {calls_made:?}", calls_made.values().sum::<u64>());
            assert_eq!(count(&calls_made, "cuGraphLaunch"), 1);
            for name in ["cuModuleGetFunction", "cuEventCreate", "cuEventDestroy_v2", "cuLaunchKernel"] {
                assert_eq!(count(&calls_made, name), 0, "{name}");
            }
            let all: u64 = calls_made.values().sum();
            assert!(all <= CALLS_OF_A_DECODE_STEP_MAX, "{all}: {calls_made:?}");
            assert_eq!(calls("libnvrtc.so.13"), compiled, "nothing is compiled");
        }
    });
}

#[test]
fn a_mixed_step_looks_up_no_kernel_after_the_first() {
    with_fake_driver("counts::a_mixed_step_looks_up_no_kernel_after_the_first", |device: Arc<dyn Device>| {
        let mut queue = device.queue().unwrap();
        let [inputs, tokens] = inputs_and_tokens(&*device);
        let mut step = |rows: u32| {
            // a mixed step rarely has the same rows twice
            let lists: Vec<Vec<Cmd>> = (0..LAYERS).map(|_| commands(&*device, &layer(rows, 4))).collect();
            calls_of(|| {
                device.write(&inputs, &[1; 4096]).unwrap();
                let tickets: Vec<_> = lists.iter().map(|list| queue.submit(list).unwrap()).collect();
                queue.wait(tickets[LAYERS - 1], LONG).unwrap();
                device.read(&tokens, &mut [0; 16]).unwrap();
            })
        };
        step(37);
        for rows in [41, 29] {
            let calls_made = step(rows);
            // an early launch is counted as a launch too
            let all = calls_made.values().sum::<u64>() - count(&calls_made, "cuLaunchKernelEx");
            eprintln!("mixed step: {all} calls, {calls_made:?}");
            for name in ["cuModuleGetFunction", "cuFuncSetAttribute"] {
                assert_eq!(count(&calls_made, name), 0, "{name}");
            }
            // beside the launches, some calls for each layer and for the step; the events of layers whose
            // tickets no one waits for are kept for a while, so new ones are created at first
            let launches = count(&calls_made, "cuLaunchKernel");
            assert!(all - launches <= 4 * LAYERS as u64 + 12, "{all}: {calls_made:?}");
        }
    });
}

/// A layer of a decode step over memory that its operations share, as a model's do.
fn shared_layer(device: &dyn Device, tokens: u32) -> Vec<Cmd> {
    let sigs = layer(tokens, tokens);
    let alone: Vec<Vec<Slice>> = sigs.iter().map(|&sig| command(device, sig).args().to_vec()).collect();
    let of = |op: usize, operand: usize| alone[op][operand].clone();
    let (normed, q, k, v, cos_sin) = (of(0, 2), of(1, 2), of(2, 2), of(3, 2), of(4, 1));
    let (residual, attended) = (of(0, 0), of(8, 2));
    let args: [Vec<Slice>; 15] = [
        vec![residual.clone(), of(0, 1), normed.clone()],
        vec![normed.clone(), of(1, 1), q.clone()],
        vec![normed.clone(), of(2, 1), k.clone()],
        vec![normed.clone(), of(3, 1), v.clone()],
        vec![q.clone(), cos_sin.clone()],
        vec![k.clone(), cos_sin],
        vec![k, v, of(6, 2), of(6, 3), of(6, 4)],
        vec![q, of(7, 1), of(7, 2), of(6, 3), of(6, 4), of(7, 5), of(7, 6)],
        vec![of(7, 5), of(7, 6), attended.clone()],
        vec![attended, of(9, 1), residual.clone()],
        vec![residual.clone(), of(10, 1), normed.clone()],
        vec![normed.clone(), of(11, 1), of(11, 2)],
        vec![normed, of(12, 1), of(12, 2)],
        vec![of(11, 2), of(12, 2), of(13, 2)],
        vec![of(13, 2), of(14, 1), residual],
    ];
    sigs.iter().zip(args).map(|(&sig, args)| Cmd::new(sig, &args).unwrap()).collect()
}

#[test]
fn a_layer_of_a_decode_step_is_nine_launches() {
    with_fake_driver("counts::a_layer_of_a_decode_step_is_nine_launches", |device: Arc<dyn Device>| {
        let mut queue = device.queue().unwrap();
        let list = shared_layer(&*device, 4);
        let mut launches = |lists: &[&[Cmd]]| {
            let made = calls_of(|| {
                let ticket = lists.iter().map(|list| queue.submit(list).unwrap()).last().unwrap();
                queue.wait(ticket, LONG).unwrap();
            });
            eprintln!("{} operations: {made:?}", list.len());
            count(&made, "cuLaunchKernel")
        };
        let one_by_one: Vec<&[Cmd]> = list.chunks(1).collect();
        assert_eq!((launches(&one_by_one), launches(&[&list])), (15, 9));
    });
}
