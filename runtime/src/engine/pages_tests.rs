//! KV of any devices against that of an only one.

use super::*;
use crate::engine::leaving::Taken;
use crate::model::graph::StepShape;
use mixfleet_cpu::CpuBackend;
use mixfleet_hal::Backend;
use mixfleet_hal::random::Stream;
use mixfleet_hwtests::reference::ReferenceDevice;
use mixfleet_scheduler::cost::{AttnSplit, ModelShape};
use mixfleet_scheduler::models;
use proptest::prelude::*;

/// Pages of an instance that a test uses.
const PAGES: u32 = 12;

/// The KV of an instance whose pools no model has, with a queue for each device.
struct Rig {
    kv: InstanceKv,
    queues: Vec<Box<dyn Queue>>,
}

impl Rig {
    fn new(shape: &ModelShape, parts: Vec<Option<KvPart>>) -> Result<Self> {
        let kv_heads = shape.kv_heads;
        let (head_dim, page_tokens, dtype) = (shape.head_dim, shape.page_tokens, shape.kv);
        let whole = KvShape { kv_heads, head_dim, page_tokens, dtype, latent: None };
        let last = parts.len() - 1;
        let devices = parts.into_iter().enumerate().map(|(at, part)| {
            // the layout of pages is a backend's own
            let device: Arc<dyn Device> = match at == last {
                true => Arc::new(ReferenceDevice::default()),
                false => CpuBackend.open("cpu@0").unwrap(),
            };
            let pools = part.iter().flat_map(|part| {
                let own = KvShape { kv_heads: to_u32(part.kv_heads.len()), ..whole };
                let bytes = u64::from(PAGES * page_tokens) * own.row() * dtype.size_bytes();
                let pool = || device.alloc(bytes, BufferUsage::Kv).unwrap();
                part.layers.clone().map(|_| (pool(), pool())).collect::<Vec<_>>()
            });
            let pools = pools.collect();
            (device, part, pools)
        });
        let devices: Vec<DeviceKv> = devices.collect();
        let queues = devices.iter().map(|(device, ..)| device.queue().unwrap()).collect();
        Ok(Rig { kv: InstanceKv::new((whole, LayerPages::whole(shape.layers())), devices, 1 << 16)?, queues })
    }

    fn of(shape: &ModelShape, partition: &Partition) -> Self {
        Rig::new(shape, KvPart::of_members(partition)).unwrap()
    }

    fn write(&mut self, span: &KvSpan<'_>, payload: &[u8]) {
        let mut queues: Vec<&mut dyn Queue> =
            self.queues.iter_mut().map(|q| &mut **q as &mut dyn Queue).collect();
        self.kv.write(&mut queues, span, payload).unwrap();
    }

    fn read(&mut self, span: &KvSpan<'_>) -> Vec<u8> {
        let mut queues: Vec<&mut dyn Queue> =
            self.queues.iter_mut().map(|q| &mut **q as &mut dyn Queue).collect();
        let bytes = span.layers.len() as u64 * self.kv.layer_bytes(to_u32(span.tokens.len()), span.wire);
        let mut place = vec![0xA5; to_usize(bytes)];
        self.kv.read(&mut queues, span, &mut place).unwrap();
        place
    }

    /// All layers of a sequence of this length, gathered by each device layer by layer into memory for some
    /// of them: the tokens before `middle` and the others as two parts of a step, in pieces.
    fn gathered(
        &mut self,
        (pages, length): (&[u32], u32),
        (middle, wire): (u32, DType),
        layers_at_once: usize,
    ) -> Vec<u8> {
        let KvShape { page_tokens: block_tokens, dtype: kv, .. } = self.kv.shape;
        let (tokens_max, sequences_max, blocks, activations) = (length, 2, PAGES, DType::F32);
        let step = StepShape { tokens_max, sequences_max, blocks, block_tokens, activations, kv };
        self.kv.leaves_in_steps(&step, &vec![layers_at_once; self.queues.len()]).unwrap();
        let taken = &mut Taken::default();
        let parts = [0..middle, middle..length].map(|part| self.kv.leaving((pages, part), wire, taken));
        let mut all = Vec::new();
        for layer in 0..self.kv.layers {
            for at in 0..self.kv.keepers.len() {
                let (member, layers) = (self.kv.keepers[at].member, self.kv.keepers[at].part.layers.clone());
                let Some(own) = layer.checked_sub(layers.start).filter(|_| layers.contains(&layer)) else {
                    continue;
                };
                assert_eq!(self.kv.layer_of(member, own as usize), layer);
                let list =
                    self.kv.gather((member, own as usize), parts.iter().map(|part| (part, true))).unwrap();
                let ticket = self.queues[member].submit(&list).unwrap();
                self.queues[member].wait(ticket, COPY_TIMEOUT).unwrap();
            }
            for part in &parts {
                for first in part.tokens.clone().step_by(3) {
                    let tokens = first..part.tokens.end.min(first + 3);
                    let bytes = to_usize(self.kv.layer_bytes(to_u32(tokens.len()), wire));
                    let mut place = vec![0xA5; bytes];
                    self.kv.read_gathered(part, (layer, tokens), &mut place).unwrap();
                    all.extend(place);
                }
            }
        }
        all
    }
}

fn shape(heads: u32, kv_heads: u32, layers: usize, (page_tokens, kv): (u32, DType)) -> ModelShape {
    let llama = models::find("llama-3.1-8b").unwrap().shape(kv);
    ModelShape { heads, kv_heads, head_dim: 4, windows: vec![None; layers], page_tokens, ..llama }
}

/// A partition that `seed` chooses among those of a shape; a single device's if the choice is impossible.
fn partition(shape: &ModelShape, seed: u64) -> Partition {
    let mut rng = Stream::new(seed);
    let members = 1 + rng.below(4) as u32;
    let mut weights = |count: u64| (0..count).map(|_| 0.2 + rng.next_unit()).collect::<Vec<f64>>();
    let chosen = match seed % 5 {
        0 => Partition::in_proportion(shape, &weights(members.into())),
        1 => Partition::in_stages(shape, &[weights(1), weights(u64::from(members))]),
        2 => Partition::attention(shape, members, AttnSplit::Head),
        3 => Partition::attention(shape, members, AttnSplit::Request),
        _ => Partition::attention(shape, members, AttnSplit::Range),
    };
    chosen.unwrap_or_else(|_| Partition::even(shape, 1).unwrap())
}

/// Numbers that every wire dtype has; of eight bits in heads of four with a scale.
fn values(count: u64, rng: &mut Stream, wire: DType) -> Vec<u8> {
    let mut bytes = Vec::new();
    if wire.is_scaled() {
        for _ in 0..count / 8 {
            let mut coded = [0; 8];
            let head = [(); 4].map(|()| rng.below(31) as f32 - 15.0);
            mixfleet_hal::scaled::encode(wire, &head, &mut coded);
            bytes.extend(coded);
        }
        return bytes;
    }
    (0..count).for_each(|_| wire.encode(f64::from(rng.below(509) as u32) - 254.0, &mut bytes));
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn kv_of_any_devices_travels_to_any_others_as_from_an_only_one_to_an_only_one(
        kv_heads in 1u32..6, group in 1u32..4, layers in 2usize..5, page_tokens in 2u32..6,
        kept in 0usize..5, seeds in [any::<u64>(), any::<u64>(), any::<u64>()],
    ) {
        let dtype = [DType::F32, DType::Bf16, DType::F32, DType::F8E4m3, DType::I8][kept];
        let shape = shape(kv_heads * group, kv_heads, layers, (page_tokens, dtype));
        let mut rng = Stream::new(seeds[0]);
        // codes of eight bits hold their own numbers alone
        let wires = if dtype.is_scaled() { &[dtype][..] } else { &DType::KV[..] };
        let wire = wires[rng.below(wires.len() as u64) as usize];
        let mut only = Rig::of(&shape, &Partition::even(&shape, 1).unwrap());
        let length = page_tokens * 4 - 1;
        let token_bytes = only.kv.layer_bytes(1, wire);
        let count = layers as u64 * u64::from(length) * token_bytes / wire.size_bytes();
        let original = values(count, &mut rng, wire);
        let mut pages = || {
            let first = rng.below(u64::from(PAGES - 8)) as u32;
            let mut pages: Vec<u32> = (first..first + 8).collect();
            (0..8).for_each(|at| pages.swap(at, rng.below(8) as usize));
            pages.truncate(4);
            pages
        };
        let (own, [theirs, others]) = (pages(), [pages(), pages()]);
        let all = |pages| KvSpan { layers: 0..layers as u32, pages, tokens: 0..length, wire };
        only.write(&all(&own), &original);
        let expected = only.read(&all(&own));
        prop_assert_eq!(&expected, &original, "what an only device gives back");

        // one device -> some devices -> other devices, layer by layer in pieces -> one device
        let (mut first, mut second) = (
            Rig::of(&shape, &partition(&shape, seeds[1])),
            Rig::of(&shape, &partition(&shape, seeds[2])),
        );
        first.write(&all(&theirs), &expected);
        let of_first = KvPart::of_members(&partition(&shape, seeds[1]));
        prop_assert_eq!(&first.read(&all(&theirs)), &expected, "{:?}", of_first);
        let (from, cut) = (seeds[0] as u32 % length, 1 + (seeds[1] as u32 % length));
        for layer in 0..layers as u32 {
            for begin in (from..length).step_by(cut as usize).chain((0..from).step_by(cut as usize)) {
                let end = (begin + cut).min(if begin < from { from } else { length });
                let piece = |pages| KvSpan { layers: layer..layer + 1, pages, tokens: begin..end, wire };
                let payload = first.read(&piece(&theirs));
                prop_assert_eq!(&payload, &only.read(&piece(&own)));
                second.write(&piece(&others), &payload);
            }
        }

        // the gathered KV of two parts of a step equals their pages
        let gathered = first.gathered((&theirs, length), (from, wire), 1 + cut as usize % 3);
        prop_assert_eq!(gathered, expected.clone(), "{:?}", of_first);
        let of_second = KvPart::of_members(&partition(&shape, seeds[2]));
        prop_assert_eq!(&second.read(&all(&others)), &expected, "{:?} -> {:?}", of_first, of_second);

        // a repeated write changes nothing else
        let anew = values(token_bytes / wire.size_bytes(), &mut Stream::new(seeds[2]), wire);
        let one = |pages| KvSpan { layers: 1..2, pages, tokens: from..from + 1, wire };
        only.write(&one(&own), &anew);
        second.write(&one(&others), &anew);
        prop_assert_eq!(second.read(&all(&others)), only.read(&all(&own)));
    }
}

#[test]
fn heads_that_several_keep_are_written_to_all_and_sent_by_one() {
    let shape = shape(8, 2, 2, (4, DType::F32));
    let partitions =
        [Partition::even(&shape, 4).unwrap(), Partition::attention(&shape, 4, AttnSplit::Head).unwrap()];
    for partition in partitions {
        let mut rig = Rig::of(&shape, &partition);
        let span = KvSpan { layers: 0..2, pages: &[3, 1], tokens: 0..7, wire: DType::F32 };
        let payload = values(2 * 7 * 2 * 2 * 4, &mut Stream::new(1), DType::F32);
        rig.write(&span, &payload);
        let sends: Vec<bool> = rig.kv.keepers.iter().map(|keeper| keeper.part.sends).collect();
        assert_eq!(sends, [true, false, true, false]);
        assert_eq!(rig.read(&span), payload);
        rig.kv.keepers.iter_mut().for_each(|keeper| keeper.part.sends = !keeper.part.sends);
        assert_eq!(rig.read(&span), payload, "the others have it too");
    }
}

#[test]
fn parts_that_leave_some_kv_out_or_have_it_twice_are_refused() {
    let shape = shape(4, 4, 2, (4, DType::F32));
    let part = |kv_heads, pages| KvPart { kv_heads, pages, ..KvPart::whole(2, 4) };
    let refused = |parts: [KvPart; 2]| Rig::new(&shape, parts.map(Some).to_vec()).err();
    assert!(refused([part(0..2, (0, 1)), part(2..4, (0, 1))]).is_none());
    assert!(refused([part(0..4, (0, 2)), part(0..4, (1, 2))]).is_none());
    for parts in [
        [part(0..2, (0, 1)), part(3..4, (0, 1))],
        [part(0..3, (0, 1)), part(2..4, (0, 1))],
        [part(0..4, (0, 2)), part(0..4, (0, 2))],
        [part(0..4, (0, 3)), part(0..4, (1, 3))],
    ] {
        let said = format!("{parts:?}");
        assert!(refused(parts).is_some_and(|error| error.to_string().contains("no single")), "{said}");
    }
}

#[test]
fn a_span_that_is_none_of_the_sequence_or_too_large_is_an_error() {
    let shape = shape(4, 2, 2, (4, DType::F32));
    let mut rig = Rig::of(&shape, &Partition::even(&shape, 2).unwrap());
    let span = KvSpan { layers: 0..1, pages: &[0, 1], tokens: 0..8, wire: DType::F32 };
    let bytes = 8 * 2 * 2 * 4 * 4;
    let spans = [
        (KvSpan { tokens: 0..9, ..span.clone() }, bytes + bytes / 8),
        (span.clone(), bytes - 4),
        (KvSpan { tokens: 0..1 << 20, pages: &[0; 1 << 18], ..span.clone() }, bytes << 17),
    ];
    for (span, bytes) in spans {
        let mut queues: Vec<&mut dyn Queue> = rig.queues.iter_mut().map(|q| &mut **q as _).collect();
        let written = rig.kv.write(&mut queues, &span, &vec![0; bytes]);
        assert!(written.unwrap_err().to_string().contains("are not the KV"));
    }
    rig.write(&span, &vec![0; bytes]);
}
