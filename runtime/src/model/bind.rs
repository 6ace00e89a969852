//! Binds the operations of a list ([`mixfleet_scheduler::layers`]) to a device's memory.

use super::arena::Activations;
use super::attention::{Attention, AttentionInputs};
use super::graph::StepInputs;
use super::{Tensor, Weights};
use mixfleet_hal::op::Extent;
use mixfleet_hal::{Cmd, Error, MatrixKind, OpSig, Result, Slice};
use mixfleet_scheduler::layers::{OpArg, OpSink, StepTable, Weight};

/// The operands that operations of a step name, and those of one layer.
#[derive(Clone, Copy)]
pub(super) struct BoundMemory<'a> {
    pub(super) activations: &'a Activations,
    /// None on an attention member.
    pub(super) weights: Option<&'a Weights>,
    /// None on a member that leaves attention to others.
    pub(super) attention: Option<(&'a Attention, &'a AttentionInputs)>,
    pub(super) inputs: Option<&'a StepInputs>,
    pub(super) layer: usize,
}

impl<'a> BoundMemory<'a> {
    fn weight(&self, weight: Weight) -> Result<&'a Tensor> {
        if weight == Weight::Sinks {
            let sinks = self.attention.and_then(|(attention, _)| attention.sinks_of(self.layer));
            let none = || Error::unsupported("the sinks of this model's attention were not loaded here");
            return sinks.ok_or_else(none);
        }
        let tensor = self.weights.and_then(|weights| weights.get(self.layer, weight));
        tensor.ok_or_else(|| Error::invalid(format!("layer {} has no {weight:?} here", self.layer)))
    }

    fn table(&self, table: StepTable) -> Result<&'a Slice> {
        let of_attention =
            self.attention.and_then(|(attention, inputs)| attention.table(self.layer, inputs, table));
        let slice = of_attention.or_else(|| self.inputs?.table(table));
        slice.ok_or_else(|| Error::invalid(format!("the step has no {table:?} here")))
    }
}

/// Makes commands of operations.
pub(super) struct Binder<'a> {
    memory: BoundMemory<'a>,
    list: Vec<Cmd>,
    /// Operands of the operation that is bound.
    args: Vec<Slice>,
    failed: Option<Error>,
}

impl<'a> Binder<'a> {
    /// Creates a binder to this memory, for about `operations` operations.
    pub(super) fn new(memory: BoundMemory<'a>, operations: usize) -> Self {
        Binder { memory, list: Vec::with_capacity(operations), args: Vec::new(), failed: None }
    }

    /// The commands of all operations.
    ///
    /// # Errors
    /// If an operand of one has no memory, or memory of another size.
    pub(super) fn finish(self) -> Result<Vec<Cmd>> {
        self.failed.map_or(Ok(self.list), Err)
    }

    fn bind(&mut self, sig: OpSig, args: &[OpArg]) -> Result<()> {
        let memory = self.memory;
        let by =
            args.iter().find_map(|arg| if let OpArg::Weight(weight) = arg { Some(*weight) } else { None });
        let sig = match by {
            Some(weight) => as_stored(sig, memory.weight(weight)?.kind()),
            None => sig,
        };
        let operands = sig.operands();
        self.args.clear();
        for arg in args {
            match *arg {
                OpArg::From(buffer, first) => {
                    let unused = || Error::invalid(format!("{}: no operand is {buffer:?}", sig.name()));
                    let operand = operands.get(self.args.len()).ok_or_else(unused)?;
                    let all = memory.activations.get(buffer);
                    let all =
                        all.ok_or_else(|| Error::invalid(format!("the step has no {buffer:?} here")))?;
                    let element_bytes = operand.dtype.size_bytes();
                    self.args.push(match operand.extent {
                        Extent::Exactly(length) => all.range(first * element_bytes, length * element_bytes),
                        Extent::PagesOf(_) => all.clone(),
                    });
                }
                OpArg::Weight(weight) => self.args.extend(memory.weight(weight)?.arrays().cloned()),
                OpArg::Table(table) => self.args.push(memory.table(table)?.clone()),
                OpArg::Pools => {
                    let none = || Error::invalid("no KV is kept here");
                    let (attention, _) = memory.attention.ok_or_else(none)?;
                    self.args.extend(attention.pools_of(memory.layer).cloned());
                }
                OpArg::Absent => {}
            }
        }
        self.list.push(Cmd::with_operands(sig, &operands, &self.args)?);
        Ok(())
    }
}

impl OpSink for Binder<'_> {
    fn push(&mut self, sig: OpSig, args: &[OpArg]) {
        if self.failed.is_none() {
            self.failed = self.bind(sig, args).err();
        }
    }
}

/// Collects operations for device queries, with the weights of one layer as stored.
pub(crate) struct NeededOps<'a> {
    weights: Option<(&'a Weights, usize)>,
    sigs: Vec<OpSig>,
    /// Whether an operation was left out since its weights are elsewhere.
    pub(crate) lacks_weights: bool,
}

impl<'a> NeededOps<'a> {
    /// Creates a collector for this layer of a model, or for one whose operations have no weights.
    pub(crate) fn of(weights: Option<(&'a Weights, usize)>) -> Self {
        NeededOps { weights, sigs: Vec::new(), lacks_weights: false }
    }

    /// The operations, each once.
    pub(crate) fn finish(mut self) -> Vec<OpSig> {
        let mut seen = std::collections::HashSet::new();
        self.sigs.retain(|sig| seen.insert(*sig));
        self.sigs
    }
}

impl OpSink for NeededOps<'_> {
    fn push(&mut self, sig: OpSig, args: &[OpArg]) {
        let mut named = args.iter().filter_map(|arg| match arg {
            OpArg::Weight(weight) if *weight != Weight::Sinks => Some(*weight),
            _ => None,
        });
        let Some(weight) = named.next() else { return self.sigs.push(sig) };
        match self.weights.and_then(|(weights, layer)| weights.get(layer, weight)) {
            Some(tensor) => self.sigs.push(as_stored(sig, tensor.kind())),
            None => self.lacks_weights = true,
        }
    }
}

/// The operation with its weights as stored.
fn as_stored(sig: OpSig, kind: MatrixKind) -> OpSig {
    match (sig, kind) {
        (OpSig::Gemm { m, n, k, x, out, bias, accumulate, .. }, MatrixKind::Plain(weight)) => {
            OpSig::Gemm { m, n, k, x, weight, out, bias, accumulate }
        }
        (OpSig::Gemm { m, n, k, x, out, bias, accumulate, .. }, MatrixKind::Quantised(weight)) => {
            OpSig::QuantisedGemm { m, n, k, x, weight, out, bias, accumulate }
        }
        (OpSig::GroupedGemm { grouped, n, k, x, out, bias, .. }, weight) => {
            OpSig::GroupedGemm { grouped, n, k, x, weight, out, bias }
        }
        (OpSig::Embed { tokens, vocab, hidden, out, .. }, MatrixKind::Plain(table)) => {
            OpSig::Embed { tokens, vocab, hidden, table, out }
        }
        (OpSig::Embed { tokens, vocab, hidden, out, .. }, MatrixKind::Quantised(table)) => {
            OpSig::QuantisedEmbed { tokens, vocab, hidden, table, out }
        }
        (OpSig::RmsNorm { rows, cols, eps, x, out, .. }, MatrixKind::Plain(weight)) => {
            OpSig::RmsNorm { rows, cols, eps, x, weight, out }
        }
        (sig, _) => sig,
    }
}
