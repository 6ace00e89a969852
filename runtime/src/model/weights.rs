//! A model's parameters in a device's memory.

use mixfleet_hal::{DType, MatrixKind, Quantised, Slice};
use mixfleet_scheduler::layers::Weight;

/// A matrix or vector on a device.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// The elements on the device; for a quantised matrix the codes.
    pub slice: Slice,
    /// Stored dtype; for codes the dtype of their words.
    pub dtype: DType,
    /// The quantised format, and the arrays after the codes.
    pub quantised: Option<(Quantised, Vec<Slice>)>,
}

impl Tensor {
    /// A tensor of elements of a dtype.
    pub fn plain(slice: Slice, dtype: DType) -> Self {
        Tensor { slice, dtype, quantised: None }
    }

    /// The stored format of the matrix.
    pub fn kind(&self) -> MatrixKind {
        match &self.quantised {
            Some((quantised, _)) => MatrixKind::Quantised(*quantised),
            None => MatrixKind::Plain(self.dtype),
        }
    }

    /// The arrays of the matrix, in the order of [`MatrixKind::parts`].
    pub fn arrays(&self) -> impl Iterator<Item = &Slice> {
        std::iter::once(&self.slice).chain(self.quantised.iter().flat_map(|(_, others)| others))
    }
}

/// The weights of a layer, or weights outside of layers, if present. Matrices are `[out features, in
/// features]`, as stored.
///
/// - `q` is `[heads * head_dim, hidden]`; with latent attention `[heads * (nope + rope), q_rank]` where
///   queries are projected to `q_rank` numbers first, by `q_down`.
/// - `kv_down` is `[kv_rank + rope, hidden]`: latents, and the rotated part of keys.
/// - `lift` is `[heads, kv_rank, nope]` and `lower` `[heads, v, kv_rank]`; `keys`, which is present where
///   latents may be expanded, is `[heads, nope + rope, kv_rank + rope]`.
/// - The gates of experts are `[experts, intermediate, hidden]`, or `[experts, intermediate, 2, hidden]` with
///   each row before the row of up, where both are one matrix.
#[derive(Clone, Debug)]
struct WeightTable([Option<Tensor>; Weight::COUNT]);

/// The parameters of a model, or of a stage of its layers, on one device.
#[derive(Clone, Debug)]
pub struct Weights {
    /// Embedding, last norm and LM head, where the stage has them.
    of_model: WeightTable,
    layers: Vec<WeightTable>,
}

impl Weights {
    /// Creates empty weights of `layers` layers.
    pub(super) fn none(layers: usize) -> Self {
        let empty = || WeightTable(std::array::from_fn(|_| None));
        Weights { of_model: empty(), layers: std::iter::repeat_with(empty).take(layers).collect() }
    }

    /// Number of decoder layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// A weight of a layer, or of the model; none if it is absent.
    pub fn get(&self, layer: usize, weight: Weight) -> Option<&Tensor> {
        let table = if weight.is_of_model() { &self.of_model } else { self.layers.get(layer)? };
        table.0[weight as usize].as_ref()
    }

    /// The entry for a weight of a layer, or of the model.
    pub(super) fn slot(&mut self, layer: usize, weight: Weight) -> &mut Option<Tensor> {
        let table = if weight.is_of_model() { &mut self.of_model } else { &mut self.layers[layer] };
        &mut table.0[weight as usize]
    }
}
