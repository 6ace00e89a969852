//! Placement of a checkpoint's tensors in a device's memory.

use super::config::ModelConfig;
use super::error::{Error, Result};
use super::experts::BIAS;
use super::latent::{self, LatentHeads};
use super::load::{Checkpoint, Location};
use super::made::{MadeMatrix, MadePart};
use super::names::{self, Cut, PlannedTensor};
use super::random::RandomCheckpoint;
use super::weights::{Tensor, Weights};
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::quantised::QuantisedPart;
use mixfleet_hal::{BufferUsage, Cmd, DType, Device, MatrixKind, OpSig, Quantised, Queue, Slice};
use mixfleet_scheduler::cost::{LatentAttention, MemberShare, MemberWork};
use mixfleet_scheduler::layers::Weight;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

/// Timeout of a device for copying any tensor.
const REPEAT_TIME_MAX: Duration = Duration::from_secs(60);

/// Bytes per write of an upload: large enough for full copy speed, small enough for a smooth progress bar.
const CHUNK_BYTES: usize = 16 << 20;

impl Checkpoint {
    /// Places all parameters in `device`'s memory. If the device imports host memory, each mapped file is
    /// imported whole and its tensors are ranges of it, except those at an offset that the device cannot
    /// address; these, and everything on other devices, are copied into one buffer each. A bias whose dtype
    /// differs from its matrix's is converted to it, as `Gemm` requires.
    ///
    /// `progress` is called with (bytes placed, bytes in all) at intervals, and at the end with both equal.
    ///
    /// # Errors
    /// When the device has too little memory or fails.
    pub fn place(&self, device: &dyn Device, progress: &mut dyn FnMut(u64, u64)) -> Result<Weights> {
        // sinks belong to the configuration
        let placed = names::tensors(&self.config).into_iter().filter(|tensor| tensor.weight != Weight::Sinks);
        let cuts = placed.map(|tensor| (tensor, Cut::Whole)).collect();
        self.place_cuts(device, cuts, Stage::whole(&self.config), progress)
    }

    /// Places a member's share of the parameters of its layers. Rows of the projections from the residual
    /// stream and of the LM head stay in place where the device can; columns of those back to it are copied;
    /// the embedding and norms are whole. None for a member that only attends.
    ///
    /// # Errors
    /// When the device has too little memory or fails.
    pub fn place_share(
        &self,
        device: &dyn Device,
        share: &MemberShare,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Option<Weights>> {
        match share.work {
            MemberWork::All => {}
            MemberWork::Products => return self.place(device, progress).map(Some),
            MemberWork::Attention => return Ok(None),
        }
        let mut all = names::tensors(&self.config);
        if self.config.tied_embeddings {
            all.push(names::lm_head(&self.config));
        }
        let cut = |tensor| names::cut(&self.config, share, &tensor).map(|cut| (tensor, cut));
        let MemberShare { layers, experts, .. } = share.clone();
        let stage = Stage { layers, experts };
        self.place_cuts(device, all.into_iter().filter_map(cut).collect(), stage, progress).map(Some)
    }

    #[expect(clippy::too_many_lines, reason = "one pass over the parts of a weight")]
    fn place_cuts(
        &self,
        device: &dyn Device,
        cuts: Vec<(PlannedTensor, Cut)>,
        stage: Stage,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Weights> {
        let limits = device.limits();
        let imports = self.import(device, &limits)?;
        let mut total = 0;
        for (tensor, cut) in &cuts {
            let name = &tensor.name;
            if let Some((latent, part, dtype)) = self.up_of(tensor, cut) {
                total += latent.made_elements(part.len()) * dtype.size_bytes();
                continue;
            }
            total += match self.made_for(name) {
                Some((_, made)) => made.cut(cut).map_err(|problem| self.trouble(name, problem))?.size_bytes(),
                None => self.stored(name).1.bytes_of(cut),
            };
        }
        let mut done = 0;
        let mut placed = Weights::none(stage.layers.len());
        let mut queue = None;
        for (tensor, cut) in cuts {
            let PlannedTensor { weight, expert, .. } = tensor;
            let layer = tensor.layer.map_or(0, |layer| (layer - stage.layers.start) as usize);
            if let Some((latent, part, dtype)) = self.up_of(&tensor, &cut) {
                let name = tensor.name;
                let all = self.values(&name).unwrap_or_default();
                let values = all.get(part.clone()).ok_or_else(|| self.trouble(&name, "damaged".into()))?;
                for (matrix, values) in latent.made(values) {
                    let tensor = latent::upload(device, &values, dtype)
                        .map_err(|error| error.context(format!("tensor '{name}'")))?;
                    *placed.slot(layer, matrix) = Some(tensor);
                }
                done += latent.made_elements(part.len()) * dtype.size_bytes();
                progress(done, total);
                continue;
            }
            let name = tensor.name;
            if let (Some((stored, made)), Some(number)) = (self.made_for(&name), expert) {
                let mut part = |part| progress(done + part, total);
                let place = (number - stage.experts.start, stage.experts.len());
                let known = placed.slot(layer, weight);
                done += self.place_expert(device, (stored, made, &cut), (known, place), &mut part)?;
                continue;
            }
            if let Some((stored, made)) = self.made_for(&name) {
                let mut part = |part| progress(done + part, total);
                let (tensor, bytes) = self.place_made(device, (stored, made, &cut), &imports, &mut part)?;
                done += bytes;
                progress(done, total);
                *placed.slot(layer, weight) = Some(tensor);
                continue;
            }
            let (stored, location) = self.stored(&name);
            let bytes = location.bytes_of(&cut);
            let dtype = self.dtype_on_device(&name, weight, location);
            if let Some(number) = expert {
                // experts are stored apart and are one operand
                let tensor = match placed.slot(layer, weight) {
                    Some(known) => known,
                    free @ None => {
                        let slice = device.alloc(bytes * stage.experts.len() as u64, BufferUsage::Weights);
                        let failed = |error: mixfleet_hal::Error| error.context(format!("tensor '{name}'"));
                        free.insert(Tensor::plain(slice.map_err(failed)?, dtype))
                    }
                };
                if tensor.dtype != dtype {
                    let problem = format!("{dtype}, and other experts have {}", tensor.dtype);
                    return Err(Error::tensor(Path::new("(device)"), &name, problem));
                }
                let to = tensor.slice.range(u64::from(number - stage.experts.start) * bytes, bytes);
                self.write(device, (stored, &cut), (dtype, &to), &mut |part| progress(done + part, total))?;
                self.shards[location.shard].unneeded(location.range.clone());
                done += bytes;
                continue;
            }
            let from = location.in_place(&cut).filter(|_| dtype == location.dtype);
            let import = imports[location.shard].as_ref().zip(from);
            let place = (location.shard, location.dtype.size_bytes());
            let slice = match import.filter(|(i, from)| self.is_addressable(i, place, *from, &limits)) {
                _ if location.repeats() && cut == Cut::Whole => self.repeat(device, &mut queue, stored)?,
                Some((import, from)) => self.used(import, location.shard, from..from + to_usize(bytes)),
                None => {
                    // converted tensors are counted by their stored size
                    let mut part = |part: u64| progress(done + part.min(bytes), total);
                    self.upload(device, (stored, &cut), dtype, &mut part)?
                }
            };
            done += bytes;
            progress(done, total);
            *placed.slot(layer, weight) = Some(Tensor::plain(slice, dtype));
        }
        // Tensors copied after a file was truncated may be zeros.
        self.check()?;
        Ok(with_tied_head(placed))
    }

    /// The split of latent attention's up-projections: the layout, their elements, and the dtype of both
    /// parts. It is the stored dtype; decoded numbers keep theirs.
    fn up_of(&self, tensor: &PlannedTensor, cut: &Cut) -> Option<(&LatentHeads, Range<usize>, DType)> {
        let latent = self.config.latent.as_ref().filter(|_| tensor.weight == Weight::KvUp)?;
        let LatentAttention { kv_rank, nope, v, .. } = latent.lengths;
        let all = 0..u64::from(self.config.heads) * u64::from(nope + v);
        let rows = if let Cut::Rows(rows) = cut { rows } else { &all };
        let [start, end] = [rows.start, rows.end].map(|row| to_usize(row * u64::from(kv_rank)));
        Some((latent, start..end, self.tensors.get(&tensor.name).map_or(DType::F32, |stored| stored.dtype)))
    }

    /// Places a matrix of one of several experts, which are stored apart and form one operand: array by array
    /// behind the experts before it, of `experts`. Returns the number of bytes.
    fn place_expert(
        &self,
        device: &dyn Device,
        (name, made, cut): (&str, &MadeMatrix, &Cut),
        (known, (number, count)): (&mut Option<Tensor>, (u32, usize)),
        progress: &mut dyn FnMut(u64),
    ) -> Result<u64> {
        let part = made.cut(cut).map_err(|problem| self.trouble(name, problem))?;
        let kind = match part.kind {
            // a group of more rows than the matrix has covers all of it
            MatrixKind::Quantised(kind) => {
                MatrixKind::Quantised(Quantised { group_rows: kind.group_rows.min(part.rows), ..kind })
            }
            plain @ MatrixKind::Plain(_) => plain,
        };
        let arrays = kind.parts(1, part.rows, part.columns);
        let tensor = match known {
            Some(known) => known,
            free @ None => {
                let alloc = |array: &QuantisedPart| {
                    let bytes = array.elements() * array.dtype.size_bytes() * count as u64;
                    device.alloc(bytes, BufferUsage::Weights)
                };
                let slices: mixfleet_hal::Result<Vec<Slice>> = arrays.iter().map(alloc).collect();
                let mut slices = slices.map_err(|error| error.context(format!("tensor '{name}'")))?;
                let others = slices.split_off(1);
                let slice = slices.swap_remove(0);
                free.insert(match kind {
                    MatrixKind::Plain(dtype) => Tensor::plain(slice, dtype),
                    MatrixKind::Quantised(kind) => {
                        Tensor { slice, dtype: DType::U32, quantised: Some((kind, others)) }
                    }
                })
            }
        };
        if tensor.kind() != kind {
            return Err(self.trouble(name, format!("{kind}, and other experts have {}", tensor.kind())));
        }
        let mut done = 0;
        let described = made.kind.parts(1, made.rows, made.columns);
        for (at, (to, cut)) in tensor.arrays().zip(&part.cuts).enumerate() {
            let array = made.array(at, &self.shards).map_err(|problem| self.trouble(name, problem))?;
            let bytes = cut.of(&array, to_usize(described[at].rows));
            let to = to.range(u64::from(number) * bytes.len() as u64, bytes.len() as u64);
            write_to(device, name, &to, &bytes, &mut |part| progress(done + part))?;
            done += bytes.len() as u64;
        }
        Ok(done)
    }

    /// The tensor that is stored for `name`: a tied LM head is the embedding.
    fn stored<'a>(&'a self, name: &'a str) -> (&'a str, &'a Location) {
        let stored = if self.tensors.contains_key(name) { name } else { names::EMBED };
        (stored, &self.tensors[stored])
    }

    /// The dtype of a tensor on the device: a bias takes its matrix's, everything else keeps its own.
    fn dtype_on_device(&self, name: &str, weight: Weight, location: &Location) -> DType {
        if weight == Weight::Correction {
            return DType::F32;
        }
        let matrix = match weight {
            Weight::ExpertGateBias | Weight::ExpertDownBias => name.strip_suffix(BIAS).map(str::to_owned),
            _ => name.strip_suffix(".bias").map(|module| format!("{module}.weight")),
        };
        let Some(matrix) = matrix else { return location.dtype };
        match self.made.get(&matrix).map(|made| made.kind) {
            Some(MatrixKind::Quantised(_)) => DType::F32,
            Some(MatrixKind::Plain(dtype)) => dtype,
            None => self.tensors.get(&matrix).map_or(location.dtype, |matrix| matrix.dtype),
        }
    }

    /// The derived matrix of `name`; a tied LM head is the embedding.
    fn made_for<'a>(&'a self, name: &'a str) -> Option<(&'a str, &'a MadeMatrix)> {
        let known = |name: &str| self.tensors.contains_key(name) || self.made.contains_key(name);
        let stored = if known(name) { name } else { names::EMBED };
        self.made.get(stored).map(|made| (stored, made))
    }

    fn trouble(&self, name: &str, problem: String) -> Error {
        Error::tensor(Path::new("(checkpoint)"), name, problem)
    }

    /// Places a derived matrix: arrays that are stored in their final form in place, where the device can.
    fn place_made(
        &self,
        device: &dyn Device,
        (name, made, cut): (&str, &MadeMatrix, &Cut),
        imports: &[Option<Slice>],
        progress: &mut dyn FnMut(u64),
    ) -> Result<(Tensor, u64)> {
        let limits = device.limits();
        let part = made.cut(cut).map_err(|problem| self.trouble(name, problem))?;
        let (mut slices, mut done) = (Vec::new(), 0);
        for (at, (kind, cut)) in
            made.kind.parts(1, made.rows, made.columns).iter().zip(&part.cuts).enumerate()
        {
            let source = made.parts[at].source();
            let rows = to_usize(kind.rows);
            let piece = match &made.parts[at] {
                MadePart::InPlace(source) => cut.piece(source.range.len(), rows),
                MadePart::Made(..) => None,
            };
            let import = imports[source.shard].as_ref().zip(piece);
            let place = (source.shard, kind.dtype.size_bytes());
            let usable = import.filter(|(import, piece)| {
                self.is_addressable(import, place, source.range.start + piece.start, &limits)
            });
            let slice = match usable {
                Some((import, piece)) => {
                    let start = source.range.start;
                    self.used(import, source.shard, start + piece.start..start + piece.end)
                }
                None => {
                    let array =
                        made.array(at, &self.shards).map_err(|problem| self.trouble(name, problem))?;
                    let mut part = |part| progress(done + part);
                    write_all(device, name, &cut.of(&array, rows), &mut part)?
                }
            };
            done += slice.bytes;
            slices.push(slice);
        }
        for part in &made.parts {
            if let MadePart::Made(source, _) = part {
                self.shards[source.shard].unneeded(source.range.clone());
            }
        }
        let mut slices = slices.into_iter();
        let first = slices.next().ok_or_else(|| self.trouble(name, "no arrays".to_owned()))?;
        Ok(match part.kind {
            MatrixKind::Plain(dtype) => (Tensor::plain(first, dtype), done),
            MatrixKind::Quantised(quantised) => {
                let quantised = Some((quantised, slices.collect()));
                (Tensor { slice: first, dtype: DType::U32, quantised }, done)
            }
        })
    }

    fn upload(
        &self,
        device: &dyn Device,
        (name, cut): (&str, &Cut),
        dtype: DType,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Slice> {
        let location = &self.tensors[name];
        let elements = location.bytes_of(cut) / location.dtype.size_bytes();
        let slice = device.alloc(elements * dtype.size_bytes(), BufferUsage::Weights);
        let slice = slice.map_err(|error| error.context(format!("tensor '{name}'")))?;
        self.write(device, (name, cut), (dtype, &slice), progress)?;
        Ok(slice)
    }

    /// Writes a part of a tensor to memory of a device, in this dtype.
    fn write(
        &self,
        device: &dyn Device,
        (name, cut): (&str, &Cut),
        (dtype, to): (DType, &Slice),
        progress: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let location = &self.tensors[name];
        let whole = self.bytes(name).unwrap_or_default();
        let packed = (*cut != Cut::Whole || location.repeats()).then(|| location.packed(whole, cut));
        let stored = packed.as_deref().unwrap_or(whole);
        let mut converted = Vec::new();
        let bytes = if dtype == location.dtype {
            stored
        } else {
            for value in location.dtype.decode(stored) {
                dtype.encode(value, &mut converted);
            }
            &converted
        };
        write_to(device, name, to, bytes, progress)
    }

    /// Uploads the repeated bytes of a tensor, and has the device copy them.
    fn repeat(&self, device: &dyn Device, queue: &mut Option<Box<dyn Queue>>, name: &str) -> Result<Slice> {
        let (location, period) = (&self.tensors[name], self.bytes(name).unwrap_or_default());
        let failed = |error: mixfleet_hal::Error| error.context(format!("tensor '{name}'"));
        let mut fill = || -> mixfleet_hal::Result<Slice> {
            let once = device.alloc(period.len() as u64, BufferUsage::Weights)?;
            device.write(&once, period)?;
            let whole = device.alloc(location.bytes(), BufferUsage::Weights)?;
            let copy = |at: u64| {
                let bytes = once.bytes.min(whole.bytes - at);
                Cmd::new(OpSig::Copy { bytes }, &[once.range(0, bytes), whole.range(at, bytes)])
            };
            let copies = (0..whole.bytes).step_by(period.len()).map(copy);
            let queue = match queue {
                Some(queue) => queue,
                None => queue.insert(device.queue()?),
            };
            let ticket = queue.submit(&copies.collect::<mixfleet_hal::Result<Vec<_>>>()?)?;
            queue.wait(ticket, REPEAT_TIME_MAX)?;
            Ok(whole)
        };
        Ok(fill().map_err(failed)?)
    }
}

/// Copies bytes to a new buffer.
fn write_all(device: &dyn Device, name: &str, bytes: &[u8], progress: &mut dyn FnMut(u64)) -> Result<Slice> {
    let failed = |error: mixfleet_hal::Error| error.context(format!("tensor '{name}'"));
    let slice = device.alloc(bytes.len() as u64, BufferUsage::Weights).map_err(failed)?;
    write_to(device, name, &slice, bytes, progress)?;
    Ok(slice)
}

/// Copies bytes to a slice of equal size.
fn write_to(
    device: &dyn Device,
    name: &str,
    to: &Slice,
    bytes: &[u8],
    progress: &mut dyn FnMut(u64),
) -> Result<()> {
    let failed = |error: mixfleet_hal::Error| error.context(format!("tensor '{name}'"));
    let mut at = 0;
    for chunk in bytes.chunks(CHUNK_BYTES) {
        device.write(&to.range(at, chunk.len() as u64), chunk).map_err(failed)?;
        at += chunk.len() as u64;
        progress(at);
    }
    Ok(())
}

impl RandomCheckpoint {
    /// Uninitialised weights, for a device that only models time: they take no host memory.
    ///
    /// # Errors
    /// When the configuration is invalid, or the device has too little memory.
    pub fn unwritten(&self, device: &dyn Device) -> Result<Weights> {
        let (config, dtype) = (self.model_config()?, self.dtype);
        let mut placed = Weights::none(config.layers as usize);
        for PlannedTensor { shape, layer, weight, expert, .. } in names::tensors(&config) {
            // the first of several experts takes the memory of all
            let copies = match (expert, &config.experts) {
                (Some(1..), _) => continue,
                (Some(0), Some(experts)) => u64::from(experts.routing.experts),
                _ => 1,
            };
            let dtype = if weight == Weight::Correction { DType::F32 } else { dtype };
            let mut alloc = |weight: Weight, elements: u64| -> Result<()> {
                let bytes = copies * elements * dtype.size_bytes();
                let tensor = Tensor::plain(device.alloc(bytes, BufferUsage::Weights)?, dtype);
                *placed.slot(layer.unwrap_or(0) as usize, weight) = Some(tensor);
                Ok(())
            };
            match (weight, &config.latent) {
                (Weight::Sinks, _) => {}
                (Weight::KvUp, Some(latent)) => {
                    for (matrix, elements) in latent.made_lengths(config.heads) {
                        alloc(matrix, elements)?;
                    }
                }
                _ => alloc(weight, shape.iter().product())?,
            }
        }
        Ok(with_tied_head(placed))
    }
}

/// The layers of a device, and its experts in each.
struct Stage {
    layers: Range<u32>,
    experts: Range<u32>,
}

impl Stage {
    fn whole(config: &ModelConfig) -> Self {
        let experts = config.experts.as_ref().map_or(0..0, |experts| experts.held.clone());
        Stage { layers: 0..config.layers, experts }
    }
}

/// Fills a missing LM head with the embedding, to which it is tied.
fn with_tied_head(mut placed: Weights) -> Weights {
    if placed.get(0, Weight::LastNorm).is_some() && placed.get(0, Weight::LmHead).is_none() {
        *placed.slot(0, Weight::LmHead) = placed.get(0, Weight::Embedding).cloned();
    }
    placed
}
