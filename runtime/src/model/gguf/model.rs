//! The tensors of a GGUF file.

use super::super::config::ModelConfig;
use super::super::error::{Error, Result};
use super::super::load::{AlignedBytes, Checkpoint, Location};
use super::super::made::{MadeMatrix, MadePart, SourceTensor};
use super::super::names::{self, PlannedTensor};
use super::super::repack;
use super::super::stored::{self, StoredTensor};
use super::blocks::{self, BlockPart};
use super::config::{OF_ROPE, config, rope_factors};
use super::file::{GgufFile, GgufTensor};
use super::kinds::GgmlKind;
use mixfleet_hal::cast::{to_u32, to_usize};
use mixfleet_hal::{DType, FileMapper, HostMemory, MatrixKind};
use mixfleet_scheduler::layers::Weight;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Opens a GGUF file as a checkpoint; tensors stay in the mapped file until they are placed.
///
/// # Errors
/// The error names the file and the key or tensor that is missing, damaged, not supported or unread.
pub(in super::super) fn open(file: &Path, mapper: &dyn FileMapper) -> Result<Checkpoint> {
    let map = |file: &Path| mapper.map(file).map_err(|e| Error::read(file, e));
    let parse = |file: &Path, memory: &Arc<dyn HostMemory>| {
        let bytes = memory.as_bytes();
        GgufFile::parse(file, bytes, bytes.len() as u64)
    };
    let mut memories = vec![map(file)?];
    let mut gguf = parse(file, &memories[0])?;
    for (at, other) in gguf.other_files()?.iter().enumerate() {
        let memory = map(other)?;
        gguf.join(parse(other, &memory)?, at + 1)?;
        memories.push(memory);
    }
    gguf.check_complete()?;
    let factors = rope_factors(&gguf).map_or(0, |(_, tensor)| tensor.shard);
    let config = config(&gguf, Some(memories[factors].as_bytes()))?;
    let mut loading = GgufLoading::new(gguf, config, memories);
    for planned in names::tensors(&loading.config) {
        loading.take(planned)?;
    }
    loading.finish()
}

/// A file whose tensors are being found.
struct GgufLoading {
    gguf: GgufFile,
    config: ModelConfig,
    memories: Vec<Arc<dyn HostMemory>>,
    tensors: HashMap<String, Location>,
    made: BTreeMap<String, MadeMatrix>,
    /// Vectors that no file stores in their final form: permuted biases, and zero biases.
    aside: AlignedBytes,
    /// Tensors that were read.
    read: HashSet<String>,
    /// Bytes of plain matrices of each dtype.
    plain_bytes: BTreeMap<DType, usize>,
}

impl GgufLoading {
    fn new(gguf: GgufFile, config: ModelConfig, memories: Vec<Arc<dyn HostMemory>>) -> Self {
        GgufLoading {
            gguf,
            config,
            memories,
            tensors: HashMap::new(),
            made: BTreeMap::new(),
            aside: AlignedBytes::default(),
            read: OF_ROPE.map(str::to_owned).into(),
            plain_bytes: BTreeMap::new(),
        }
    }

    /// Finds a tensor of the model.
    fn take(&mut self, planned: PlannedTensor) -> Result<()> {
        let stored = self.stored_name(&planned);
        let StoredTensor { rows: fused, fold, shape: whole, .. } =
            stored::stored_tensor(&self.config, &planned);
        let PlannedTensor { name, shape, weight, expert, .. } = planned;
        let file = self.gguf.file.clone();
        let found = stored.and_then(|name| self.gguf.tensors.get(&name).cloned().map(|t| (name, t)));
        let Some((stored, tensor)) = found else {
            if weight.is_bias() {
                // another layer, or another matrix of this layer, has it
                let zeros = vec![0; to_usize(shape[0]) * size_of::<f32>()];
                self.put_aside(name, DType::F32, shape, &zeros);
                return Ok(());
            }
            let problem = format!("missing, expected {shape:?} for this {}", self.config.family);
            return Err(Error::tensor(&file, &name, problem));
        };
        let (rows, columns) = if let [rows, columns] = shape[..] { (rows, columns) } else { (1, shape[0]) };
        let tensor = match (expert, fused) {
            (Some(expert), _) => part_of_experts(&tensor, rows, expert),
            (None, Some(part)) if tensor.rows == whole[0] => tensor_rows(&tensor, part),
            (None, Some(_)) => None,
            (None, None) => Some(tensor),
        };
        let tensor = tensor.filter(|tensor| (tensor.rows, tensor.columns) == (rows, columns));
        let Some(tensor) = tensor else {
            let (rows, columns) = self.gguf.tensors.get(&stored).map_or((0, 0), |t| (t.rows, t.columns));
            return Err(Error::tensor(&file, &stored, format!("{rows} x {columns}, expected {shape:?}")));
        };
        self.read.insert(stored.clone());
        let paired = self.is_paired(weight);
        match tensor.kind.plain() {
            Some(dtype) if paired && shape.len() == 1 => {
                let bytes = self.memories[tensor.shard].as_bytes().get(tensor.range.clone());
                let head_dim = self.config.head_dim as usize;
                let ordered = repack::reordered(bytes.unwrap_or_default(), to_usize(shape[0]), |row| {
                    repack::unpaired(row, head_dim)
                });
                self.put_aside(name, dtype, shape, &ordered);
            }
            Some(dtype) if fold.is_some() => {
                let bytes = self.memories[tensor.shard].as_bytes().get(tensor.range.clone());
                let folded = fold.map(|fold| fold.apply(dtype, bytes.unwrap_or_default()));
                self.put_aside(name, DType::F32, shape, &folded.unwrap_or_default());
            }
            Some(dtype) if !paired => {
                if shape.len() == 2 {
                    *self.plain_bytes.entry(dtype).or_insert(0) += tensor.range.len();
                }
                let GgufTensor { shard, range, .. } = tensor;
                self.tensors.insert(name, Location { dtype, shape, shard, range });
            }
            _ if shape.len() == 1 => {
                let problem = format!("type {} for a vector is not supported", tensor.kind.name());
                return Err(Error::tensor(&file, &stored, problem));
            }
            _ => {
                let head_dim = paired.then_some(self.config.head_dim as usize);
                let scale = self.outer_scale(&stored, &tensor, expert)?;
                let matrix = made_matrix(&tensor, head_dim, scale);
                self.made.insert(name, matrix.map_err(|p| Error::tensor(&file, &stored, p))?);
            }
        }
        Ok(())
    }

    fn put_aside(&mut self, name: String, dtype: DType, shape: Vec<u64>, bytes: &[u8]) {
        let range = self.aside.append(bytes);
        self.tensors.insert(name, Location { dtype, shape, shard: self.memories.len(), range });
    }

    /// The scale of a whole NVFP4 matrix, which is a tensor of its own.
    fn outer_scale(&mut self, stored: &str, tensor: &GgufTensor, expert: Option<u32>) -> Result<f32> {
        let name = stored.strip_suffix(".weight").map(|stem| format!("{stem}.scale")).unwrap_or_default();
        let found = self.gguf.tensors.get(&name).filter(|_| tensor.kind == GgmlKind::Nvfp4);
        let Some(scale) = found else { return Ok(1.0) };
        let at = expert.map_or(0, |expert| expert as usize) * size_of::<f32>();
        let bytes = self.memories[scale.shard].as_bytes().get(scale.range.clone()).unwrap_or_default();
        let scale =
            bytes.get(at..).and_then(|bytes| bytes.first_chunk()).filter(|_| scale.kind == GgmlKind::F32);
        let wrong = || Error::tensor(&self.gguf.file, &name, "expected an F32 for each matrix");
        let scale = f32::from_le_bytes(*scale.ok_or_else(wrong)?);
        self.read.insert(name);
        Ok(scale)
    }

    /// Returns the checkpoint, once all tensors of the model were found.
    fn finish(mut self) -> Result<Checkpoint> {
        let derived = |name: &str| name.ends_with("rotary_emb.inv_freq") || name.contains(".attn_rot_embd.");
        let mut unread: Vec<&String> =
            self.gguf.tensors.keys().filter(|name| !self.read.contains(*name) && !derived(name)).collect();
        unread.sort_unstable();
        if let Some(first) = unread.first() {
            let problem = match unread.len() {
                1 => "nothing here reads it, so that answers would be wrong".to_owned(),
                count => format!("nothing here reads it and {} others: answers would be wrong", count - 1),
            };
            return Err(Error::tensor(&self.gguf.file, first, problem));
        }
        let most = self.plain_bytes.iter().max_by_key(|(dtype, bytes)| (**bytes, **dtype));
        self.config.dtype = most.map_or(DType::Bf16, |(dtype, _)| *dtype);
        let mut shards = self.memories;
        if !self.aside.as_bytes().is_empty() {
            shards.push(Arc::new(self.aside));
        }
        Ok(Checkpoint { config: self.config, shards, tensors: self.tensors, made: self.made })
    }

    /// The name of a checkpoint's tensor in a GGUF file.
    fn stored_name(&self, tensor: &PlannedTensor) -> Option<String> {
        let has_experts = tensor.layer.is_some_and(|layer| self.config.experts_of(layer as usize).is_some());
        let module = match tensor.weight {
            Weight::Embedding => "token_embd",
            Weight::LastNorm => "output_norm",
            Weight::LmHead => "output",
            Weight::AttnNorm => "attn_norm",
            Weight::MlpNorm if self.config.family == "seed_oss" => "post_attention_norm",
            Weight::MlpNorm => "ffn_norm",
            Weight::AttnPostNorm => "post_attention_norm",
            Weight::MlpPostNorm => "post_ffw_norm",
            Weight::Q | Weight::K | Weight::V if self.config.layout.fused_qkv => "attn_qkv",
            Weight::Gate | Weight::Up if self.config.layout.fused_mlp => "ffn_up",
            Weight::Q | Weight::QBias => "attn_q",
            Weight::K | Weight::KBias => "attn_k",
            Weight::V | Weight::VBias => "attn_v",
            Weight::O | Weight::OBias => "attn_output",
            Weight::QNorm => "attn_q_norm",
            Weight::KNorm => "attn_k_norm",
            // beside experts it is the shared expert
            Weight::Gate if has_experts => "ffn_gate_shexp",
            Weight::Up if has_experts => "ffn_up_shexp",
            Weight::Down if has_experts => "ffn_down_shexp",
            Weight::Gate | Weight::GateBias => "ffn_gate",
            Weight::Up | Weight::UpBias => "ffn_up",
            Weight::Down | Weight::DownBias => "ffn_down",
            Weight::Correction => "exp_probs_b",
            Weight::Router => "ffn_gate_inp",
            Weight::SharedGate => "ffn_gate_inp_shexp",
            Weight::ExpertGate => "ffn_gate_exps",
            Weight::ExpertUp => "ffn_up_exps",
            Weight::ExpertDown => "ffn_down_exps",
            _ => return None,
        };
        let end =
            if tensor.weight.is_bias() || tensor.weight == Weight::Correction { "bias" } else { "weight" };
        Some(match tensor.layer {
            Some(layer) => format!("blk.{layer}.{module}.{end}"),
            None => format!("{module}.{end}"),
        })
    }

    /// Whether rows of a tensor are in the order of rotated pairs.
    fn is_paired(&self, weight: Weight) -> bool {
        let paired = ["llama", "mixtral", "granite", "granitemoeshared", "ministral3", "smollm3"]
            .contains(&self.config.family.as_str());
        paired && matches!(weight, Weight::Q | Weight::K | Weight::QBias | Weight::KBias)
    }
}

/// The rows of one expert in a tensor of all experts; none if there are fewer.
fn part_of_experts(all: &GgufTensor, rows: u64, expert: u32) -> Option<GgufTensor> {
    let bytes = to_usize((all.range.len() as u64).checked_div(all.rows)?.checked_mul(rows)?);
    let start = all.range.start.checked_add(bytes.checked_mul(expert as usize)?)?;
    let end = start.checked_add(bytes).filter(|end| *end <= all.range.end)?;
    Some(GgufTensor { rows, range: start..end, ..all.clone() })
}

/// A range of rows of a tensor.
fn tensor_rows(all: &GgufTensor, rows: Range<u64>) -> Option<GgufTensor> {
    let row_bytes = (all.range.len() as u64).checked_div(all.rows)?;
    let byte = |row: u64| Some(all.range.start + to_usize(row.checked_mul(row_bytes)?));
    let range = byte(rows.start)?..byte(rows.end)?;
    (range.end <= all.range.end).then(|| GgufTensor { rows: rows.end - rows.start, range, ..all.clone() })
}

/// A matrix of blocks or of elements, whose rows are in the order of rotated pairs in heads of this length,
/// if given, and the scale of the whole matrix.
fn made_matrix(
    tensor: &GgufTensor,
    head_dim: Option<usize>,
    outer: f32,
) -> std::result::Result<MadeMatrix, String> {
    let (rows, columns) = (to_u32(tensor.rows), to_u32(tensor.columns));
    let source = SourceTensor { shard: tensor.shard, range: tensor.range.clone() };
    let order = move |row: usize| head_dim.map_or(row, |head_dim| repack::unpaired(row, head_dim));
    let (size, kind) = ((rows as usize, columns as usize), tensor.kind);
    if let Some(dtype) = kind.plain() {
        let part = MadePart::made(&source, move |bytes| repack::reordered(bytes, size.0, order));
        return MadeMatrix::new(MatrixKind::Plain(dtype), (rows, columns), vec![part]);
    }
    let quantised = kind.quantised().ok_or_else(|| "it is not quantised".to_owned())?;
    let part = |name: &str| {
        let what = match name {
            "high" => BlockPart::High,
            "scales" => BlockPart::Scales,
            "zeros" => BlockPart::Zeros,
            "supers" => BlockPart::Supers,
            "outer" => return MadePart::made(&source, move |_| outer.to_le_bytes().to_vec()),
            _ => BlockPart::Codes,
        };
        MadePart::made(&source, move |bytes| blocks::rows_of(kind, bytes, size, what, order))
    };
    let parts = quantised.parts(1, rows, columns).iter().map(|array| part(array.name)).collect();
    MadeMatrix::new(MatrixKind::Quantised(quantised), (rows, columns), parts)
}
