//! A checkpoint on the host: configuration, mapped safetensors and the positions of tensors in them.

use super::config::ModelConfig;
use super::error::{Error, Result};
use super::fields::{Fields, check_regular, read_object_if_present};
use super::gguf::{self, is_gguf};
use super::made::{MadeMatrix, SourceTensor};
use super::names::{Cut, PlannedTensor};
use super::quantisation::{Quantisation, float_dtype, side};
use super::schemes::{FoundTensor, fused_experts};
use super::stored::{self, NormFold, StoredTensor};
use super::unread::ReadTensors;
use super::{header, names, wrapped};
use mixfleet_hal::cast::{to_f32, to_usize};
use mixfleet_hal::{DType, FileMapper, HostMemory};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Files of a checkpoint that other modules read.
const OTHER_FILES: [&str; 4] =
    ["tokenizer.json", "tiktoken.model", "tokenizer_config.json", "chat_template.jinja"];

/// A loaded checkpoint. Its files are mapped once; [`place`](Self::place) gives them to any number of
/// devices, which use the mapping itself where they can.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// The model's shape.
    pub config: ModelConfig,
    pub(super) shards: Vec<Arc<dyn HostMemory>>,
    pub(super) tensors: HashMap<String, Location>,
    /// Matrices that are quantised, or stored in another order.
    pub(super) made: BTreeMap<String, MadeMatrix>,
}

/// The position of a tensor. If its range is shorter than the tensor, the elements of the range repeat.
#[derive(Clone, Debug)]
pub(super) struct Location {
    pub(super) dtype: DType,
    pub(super) shape: Vec<u64>,
    pub(super) shard: usize,
    pub(super) range: Range<usize>,
}

/// The part of a stored tensor that forms a planned one.
struct TensorPart {
    shape: Vec<u64>,
    /// The rows; all if none.
    rows: Option<Range<u64>>,
    fold: Option<NormFold>,
}

impl Location {
    /// Bytes of the whole tensor.
    pub(super) fn bytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.dtype.size_bytes()
    }

    pub(super) fn repeats(&self) -> bool {
        self.bytes() != self.range.len() as u64
    }

    /// Bytes of a row.
    fn row_bytes(&self) -> u64 {
        self.shape.iter().skip(1).product::<u64>() * self.dtype.size_bytes()
    }

    /// Bytes of a part of the tensor.
    pub(super) fn bytes_of(&self, cut: &Cut) -> u64 {
        let len = |range: &Range<u64>| range.end - range.start;
        match cut {
            Cut::Whole => self.bytes(),
            Cut::Rows(rows) => len(rows) * self.row_bytes(),
            Cut::Columns(columns) => self.shape[0] * len(columns) * self.dtype.size_bytes(),
            Cut::RowsOfEach(rows, of) => self.shape[0] / of * len(rows) * self.row_bytes(),
        }
    }

    /// The planned tensor of these rows, changed by `fold`; a changed one is copied to the arena, a shard of
    /// that number.
    fn planned(self, part: TensorPart, bytes: &[u8], aside: &mut AlignedBytes, number: usize) -> Self {
        let TensorPart { shape, rows, fold } = part;
        let row_bytes = self.row_bytes();
        let start = self.range.start;
        let byte = |row: u64| start + to_usize(row * row_bytes);
        let range = rows.map_or(self.range.clone(), |rows| byte(rows.start)..byte(rows.end));
        match fold {
            None => Location { shape, range, ..self },
            Some(fold) => {
                let folded = fold.apply(self.dtype, bytes.get(range).unwrap_or_default());
                Location { dtype: DType::F32, shape, shard: number, range: aside.append(&folded) }
            }
        }
    }

    /// The first byte in the file of a contiguous part.
    pub(super) fn in_place(&self, cut: &Cut) -> Option<usize> {
        match cut {
            Cut::Whole => Some(self.range.start),
            Cut::Rows(rows) if !self.repeats() => {
                Some(self.range.start + to_usize(rows.start * self.row_bytes()))
            }
            Cut::Rows(_) | Cut::Columns(_) | Cut::RowsOfEach(..) => None,
        }
    }

    /// A copy of a part, whose stored elements are `stored`.
    pub(super) fn packed(&self, stored: &[u8], cut: &Cut) -> Vec<u8> {
        let mut packed = Vec::with_capacity(to_usize(self.bytes_of(cut)));
        let mut copy = |from: u64, bytes: u64| {
            let (mut from, mut left) = (to_usize(from % stored.len().max(1) as u64), to_usize(bytes));
            while left > 0 && !stored.is_empty() {
                let part = left.min(stored.len() - from);
                packed.extend_from_slice(&stored[from..from + part]);
                (from, left) = (0, left - part);
            }
        };
        match cut {
            Cut::Whole => copy(0, self.bytes()),
            Cut::Rows(rows) => copy(rows.start * self.row_bytes(), self.bytes_of(cut)),
            Cut::Columns(columns) => {
                let element_bytes = self.dtype.size_bytes();
                let bytes = (columns.end - columns.start) * element_bytes;
                let first = columns.start * element_bytes;
                (0..self.shape[0]).for_each(|row| copy(row * self.row_bytes() + first, bytes));
            }
            Cut::RowsOfEach(rows, of) => {
                let bytes = (rows.end - rows.start) * self.row_bytes();
                (0..self.shape[0] / of).for_each(|i| copy((i * of + rows.start) * self.row_bytes(), bytes));
            }
        }
        packed
    }
}

/// A tensor in host memory, by value.
#[derive(Clone, Debug)]
pub struct HostTensor {
    /// The tensor's name in a checkpoint, such as `model.norm.weight`.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Row-major shape.
    pub shape: Vec<u64>,
    /// Little-endian elements.
    pub bytes: Vec<u8>,
}

/// A mapped file and its checked header.
struct Shard {
    file: PathBuf,
    memory: Arc<dyn HostMemory>,
    entries: Vec<(String, header::Entry)>,
}

impl Checkpoint {
    /// Loads the checkpoint in `directory`, which may also be a GGUF file: `config.json`,
    /// `generation_config.json` where present, and `model.safetensors` or the shards of
    /// `model.safetensors.index.json`. Nothing is copied.
    ///
    /// # Errors
    /// The error names the file, and the field or tensor, that is missing, damaged or unsupported, or that is
    /// unread although answers depend on it.
    pub fn open(directory: &Path, mapper: &dyn FileMapper) -> Result<Self> {
        if is_gguf(directory) {
            return gguf::open(directory, mapper);
        }
        OTHER_FILES.iter().try_for_each(|name| check_regular(&directory.join(name)))?;
        let OpenedFiles { mut config, read, shards } = OpenedFiles::open(directory, mapper)?;
        let found = found_tensors(&shards, &read)?;
        let mut aside = AlignedBytes::default();
        let quantisation = Quantisation::open(directory)?;
        let find = |name: &str| {
            let (shard, entry) = found.get(name)?;
            let source = SourceTensor { shard: *shard, range: entry.range.clone() };
            let bytes = shards[*shard].memory.as_bytes().get(entry.range.clone()).unwrap_or_default();
            Some(FoundTensor { source, dtype: entry.dtype.clone(), shape: entry.shape.clone(), bytes })
        };
        let (mut tensors, mut made) = (HashMap::new(), BTreeMap::new());
        for planned in names::tensors(&config) {
            let StoredTensor { name: stored, shape: stored_shape, rows, fold } =
                stored::stored_tensor(&config, &planned);
            let PlannedTensor { name, shape, weight, expert, .. } = planned;
            if weight.is_of_experts()
                && expert.is_none()
                && let Some(experts) = &config.experts
                && found.get(name.as_str()).is_none_or(|(_, entry)| entry.shape != shape)
            {
                let (rows, columns) = (side(shape[0]), side(shape[1]));
                let scheme = quantisation.scheme(&name);
                let matrix = fused_experts(scheme, &name, (experts.routing.experts, rows, columns), &find);
                let matrix =
                    matrix.map_err(|(tensor, problem)| Error::tensor(directory, &tensor, problem))?;
                made.insert(name, matrix);
                continue;
            }
            let plain =
                found.get(stored.as_str()).is_some_and(|(_, entry)| float_dtype(&entry.dtype).is_some());
            let module = stored.strip_suffix(".weight").filter(|_| !plain && shape.len() == 2);
            if let Some((module, scheme)) = module.and_then(|m| Some((m, quantisation.scheme(m)?))) {
                let matrix = scheme.matrix(module, (side(stored_shape[0]), side(stored_shape[1])), &find);
                let matrix =
                    matrix.map_err(|(tensor, problem)| Error::tensor(directory, &tensor, problem))?;
                let matrix = match rows {
                    Some(rows) => matrix.rows_of(rows),
                    None => Ok(matrix),
                };
                made.insert(name, matrix.map_err(|problem| Error::tensor(directory, &stored, problem))?);
                continue;
            }
            let Some(&(shard, entry)) = found.get(stored.as_str()) else {
                let problem = format!("missing, expected {stored_shape:?} for this {}", config.family);
                return Err(Error::tensor(directory, &stored, problem));
            };
            let dtype = check(&shards[shard].file, &stored, entry, &stored_shape)?;
            let whole = Location { dtype, shape: flattened(stored_shape), shard, range: entry.range.clone() };
            let bytes = shards[shard].memory.as_bytes();
            let part = TensorPart { shape, rows, fold };
            tensors.insert(name, whole.planned(part, bytes, &mut aside, shards.len()));
        }
        check_all_read(&shards, &read)?;
        if let Some(dtype) = most_common_dtype(&tensors) {
            config.dtype = dtype;
        }
        let mut shards: Vec<_> = shards.into_iter().map(|shard| shard.memory).collect();
        if !aside.as_bytes().is_empty() {
            shards.push(Arc::new(aside));
        }
        Ok(Checkpoint { config, shards, tensors, made }.with_sinks())
    }

    /// Creates a checkpoint of tensors in memory, as stored.
    ///
    /// # Errors
    /// The error names the tensor that is missing or has another shape or size than `config` requires.
    pub fn from_parts(config: ModelConfig, parts: Vec<HostTensor>) -> Result<Self> {
        let place = Path::new("(memory)");
        let parts: HashMap<String, HostTensor> =
            parts.into_iter().map(|part| (part.name.clone(), part)).collect();
        let mut arena = AlignedBytes::default();
        let mut tensors = HashMap::new();
        for planned in names::tensors(&config) {
            let StoredTensor { name, shape, rows, fold } = stored::stored_tensor(&config, &planned);
            let Some(part) = parts.get(&name) else {
                return Err(Error::tensor(place, &name, format!("missing, expected {shape:?}")));
            };
            let needed = shape.iter().product::<u64>() * part.dtype.size_bytes();
            let fits = part.shape == shape && part.bytes.len() as u64 == needed;
            if !fits || !DType::FLOATS.contains(&part.dtype) {
                let problem = format!(
                    "{} {:?} in {} bytes, expected {shape:?} of a floating-point type",
                    part.dtype,
                    part.shape,
                    part.bytes.len()
                );
                return Err(Error::tensor(place, &name, problem));
            }
            let shape = flattened(shape);
            let whole = Location { dtype: part.dtype, shape, shard: 0, range: 0..part.bytes.len() };
            let of = TensorPart { shape: planned.shape, rows, fold };
            let Location { dtype, shape, range, .. } = whole.planned(of, &part.bytes, &mut arena, 0);
            // folded tensors are in the arena, and other parts of a tensor are copied to it
            let folded = fold.is_some();
            let range = if folded { range } else { arena.append(&part.bytes[range]) };
            tensors.insert(planned.name, Location { dtype, shape, shard: 0, range });
        }
        let shards: Vec<Arc<dyn HostMemory>> = vec![Arc::new(arena)];
        Ok(Checkpoint { config, shards, tensors, made: BTreeMap::new() }.with_sinks())
    }

    /// Reads the sinks of attention, which are a part of the configuration.
    pub(super) fn with_sinks(mut self) -> Self {
        if self.config.sinks.is_some() {
            let of_layer = |layer| self.values(&names::in_layer(layer, names::SINKS)).unwrap_or_default();
            let all = (0..self.config.layers as usize).flat_map(of_layer).map(to_f32);
            self.config.sinks = Some(all.collect());
        }
        self
    }

    /// Bytes of all parameters as stored.
    pub fn size_bytes(&self) -> u64 {
        let made: u64 = self.made.values().map(MadeMatrix::size_bytes).sum();
        self.tensors.values().map(Location::bytes).sum::<u64>() + made
    }

    /// The stored elements of a tensor, or `None` where the model has no such tensor or derives it from
    /// others. They are complete, except in a [repeating](super::RandomCheckpoint::repeating) checkpoint.
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        let tensor = self.tensors.get(name)?;
        self.shards[tensor.shard].as_bytes().get(tensor.range.clone())
    }

    /// A tensor as `f64`, for the oracle; `None` where the model has no such tensor.
    pub fn values(&self, name: &str) -> Option<Vec<f64>> {
        if let Some(made) = self.made.get(name) {
            return made.values(&self.shards);
        }
        let location = self.tensors.get(name)?;
        let mut values = location.dtype.decode(self.bytes(name)?);
        if location.repeats() {
            let elements = to_usize(location.shape.iter().product::<u64>());
            values = values.into_iter().cycle().take(elements).collect();
        }
        Some(values)
    }

    /// Name, dtype and shape of every tensor that is stored as it is used, sorted by name.
    pub fn directory(&self) -> Vec<(&str, DType, &[u64])> {
        let mut all: Vec<_> =
            self.tensors.iter().map(|(name, t)| (name.as_str(), t.dtype, t.shape.as_slice())).collect();
        all.sort_unstable_by_key(|(name, ..)| *name);
        all
    }
}

/// The shape of matrices in sequence as one matrix.
fn flattened(shape: Vec<u64>) -> Vec<u64> {
    match shape[..] {
        [matrices, rows, columns] => vec![matrices.saturating_mul(rows), columns],
        _ => shape,
    }
}

/// The tensors of a checkpoint's files by this model's names: each with its shard.
fn found_tensors<'a>(
    shards: &'a [Shard],
    read: &ReadTensors,
) -> Result<HashMap<String, (usize, &'a header::Entry)>> {
    let mut found: HashMap<String, (usize, &header::Entry)> = HashMap::new();
    for (i, shard) in shards.iter().enumerate() {
        for (name, entry) in &shard.entries {
            let Some(text) = read.text_name(name) else { continue };
            if let Some((other, _)) = found.insert(text.into_owned(), (i, entry)) {
                let problem = format!("also in {}", shards[other].file.display());
                return Err(Error::tensor(&shard.file, name, problem));
            }
        }
    }
    Ok(found)
}

/// A checkpoint's configuration and files.
struct OpenedFiles {
    config: ModelConfig,
    read: ReadTensors,
    shards: Vec<Shard>,
}

impl OpenedFiles {
    fn open(directory: &Path, mapper: &dyn FileMapper) -> Result<Self> {
        let mut config = ModelConfig::open(directory)?;
        let object = read_object_if_present(&directory.join("config.json"))?.unwrap_or_default();
        let (drafts, is_wrapped) = (has_drafts(&object), wrapped::is_wrapped(&object));
        let read = ReadTensors::of(&config, drafts, is_wrapped);
        let shards = open_shards(directory, mapper, &read)?;
        if config.tied_embeddings && has_own_head(&shards, &read) {
            // as in transformers: the file's head counts, and not the configuration
            config.tied_embeddings = false;
        }
        let read = ReadTensors::of(&config, drafts, is_wrapped);
        Ok(OpenedFiles { config, read, shards })
    }
}

/// Whether the files have an LM head that differs from the embedding.
fn has_own_head(shards: &[Shard], read: &ReadTensors) -> bool {
    let tensor = |wanted: &str| {
        let all = shards.iter().flat_map(|shard| shard.entries.iter().map(move |entry| (shard, entry)));
        let mut named = all.filter(|(_, (name, _))| read.text_name(name).is_some_and(|name| name == wanted));
        let (shard, (_, entry)) = named.next()?;
        Some((&entry.dtype, &entry.shape, shard.memory.as_bytes().get(entry.range.clone())?))
    };
    let (head, embedding) = (tensor(names::LM_HEAD), tensor(names::EMBED));
    head.is_some() && head != embedding
}

/// Whether a configuration has layers that only draft tokens, behind its own.
fn has_drafts(object: &Map<String, Value>) -> bool {
    object.get("num_nextn_predict_layers").and_then(Value::as_u64).is_some_and(|layers| layers > 0)
}

/// Refuses unread tensors, unless answers are the same without them.
fn check_all_read(shards: &[Shard], read: &ReadTensors) -> Result<()> {
    for shard in shards {
        let unread = shard.entries.iter().find(|(name, entry)| {
            let bytes = shard.memory.as_bytes().get(entry.range.clone()).unwrap_or_default();
            !read.needs(name) && !read.leaves_out(name, bytes)
        });
        if let Some((name, _)) = unread {
            let problem = "nothing here reads it, so that answers would be wrong";
            return Err(Error::tensor(&shard.file, name, problem));
        }
    }
    Ok(())
}

/// Opens the files of a checkpoint directory: the required ones, and other files present.
fn open_shards(directory: &Path, mapper: &dyn FileMapper, read: &ReadTensors) -> Result<Vec<Shard>> {
    let open = |name: &str| -> Result<Shard> {
        let file = directory.join(name);
        let memory = mapper.map(&file).map_err(|e| Error::read(&file, e))?;
        let entries = header::read(&file, memory.as_bytes())?;
        Ok(Shard { file, memory, entries })
    };
    if directory.join(SINGLE).exists() {
        return Ok(vec![open(SINGLE)?]);
    }
    let index = directory.join(INDEX);
    let Some(object) = read_object_if_present(&index)? else {
        return Err(Error::file(directory, no_weights(directory)));
    };
    let fields = Fields::new(&index, &object);
    let Some(map) = fields.object("weight_map")? else {
        return Err(fields.error("weight_map", "missing, expected an object of tensor to file"));
    };
    let mut files: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (tensor, file) in map {
        let plain = |name: &&str| Path::new(name).file_name().is_some_and(|last| last == *name);
        let Some(file) = file.as_str().filter(plain) else {
            return Err(Error::tensor(&index, tensor, format!("in {file}, expected a file name")));
        };
        files.entry(file).or_default().insert(tensor);
    }
    let mut shards = Vec::with_capacity(files.len());
    for (file, mut promised) in files {
        if !directory.join(file).exists() && promised.iter().all(|name| read.lacks_nothing_without(name)) {
            continue;
        }
        promised.retain(|name| read.needs(name));
        let shard = open(file)?;
        for (name, _) in &shard.entries {
            promised.remove(name.as_str());
        }
        if let Some(name) = promised.first() {
            return Err(Error::tensor(&shard.file, name, format!("missing, though {INDEX} says it is here")));
        }
        shards.push(shard);
    }
    Ok(shards)
}

/// Returns the error of a directory without weights; it names the files that are there instead.
fn no_weights(directory: &Path) -> String {
    const OTHERS: [&str; 8] = ["bin", "pt", "pth", "h5", "msgpack", "onnx", "ckpt", "npz"];
    let missing = format!("there are no weights: neither {SINGLE} nor {INDEX} is here");
    let files = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<String> = files.map(|file| file.file_name().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    let ends = |name: &str, end: &str| Path::new(name).extension().is_some_and(|found| found == end);
    if names.iter().any(|name| name.starts_with("adapter_model.")) {
        return format!(
            "{missing}, but an adapter (LoRA): merge it into its base model, and serve the result"
        );
    }
    if let Some(name) = names.iter().find(|name| ends(name, "safetensors")) {
        return format!("{missing}, though {name} is: the index was not downloaded");
    }
    match names.iter().find(|name| OTHERS.iter().any(|end| ends(name, end))) {
        Some(name) => {
            format!("{missing}, and the format of {name} is not supported; supported: safetensors, GGUF")
        }
        None => format!("{missing}; download them, or use random ones with --random-weights"),
    }
}

/// The dtype of a tensor that must have `shape`.
fn check(file: &Path, name: &str, entry: &header::Entry, shape: &[u64]) -> Result<DType> {
    let Some(dtype) = float_dtype(&entry.dtype) else {
        let problem = format!("dtype {} is not supported; supported: F32, BF16, F16", entry.dtype);
        return Err(Error::tensor(file, name, problem));
    };
    if entry.shape != shape {
        let problem = format!("shape {:?}, expected {shape:?} by config.json", entry.shape);
        return Err(Error::tensor(file, name, problem));
    }
    Ok(dtype)
}

fn most_common_dtype(tensors: &HashMap<String, Location>) -> Option<DType> {
    let bytes_of = |dtype| -> usize {
        tensors.values().filter(|tensor| tensor.dtype == dtype).map(|tensor| tensor.range.len()).sum()
    };
    DType::FLOATS.into_iter().max_by_key(|dtype| bytes_of(*dtype))
}

/// Host memory in which the start of every piece is aligned to a cache line.
#[derive(Debug, Default)]
pub(super) struct AlignedBytes(Vec<CacheLine>);

#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct CacheLine([u8; 64]);

impl AlignedBytes {
    /// Copies `bytes` to the next free cache line and returns the range.
    pub(super) fn append(&mut self, bytes: &[u8]) -> Range<usize> {
        let line_bytes = size_of::<CacheLine>();
        let first = self.0.len();
        self.0.resize(first + bytes.len().div_ceil(line_bytes), CacheLine([0; 64]));
        bytemuck::cast_slice_mut(&mut self.0[first..])[..bytes.len()].copy_from_slice(bytes);
        first * line_bytes..first * line_bytes + bytes.len()
    }
}

impl HostMemory for AlignedBytes {
    fn as_bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

#[cfg(test)]
#[path = "load_tests.rs"]
mod tests;
