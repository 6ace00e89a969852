//! Plans copies between rows and paged KV.

use super::{GROUP, NAN, Planner, TensorView, words};
use crate::kernels::{Kernel, ShaderFile};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{Error, KvShape, OpSig, Result};

/// A part of keys and values: pages from `first` to `end`.
pub(super) struct KvPageRange {
    pub(super) pools: [TensorView; 2],
    pub(super) first: u32,
    pub(super) end: u32,
}

/// Returns the pools of keys and of values; keys that contain their values are both.
pub(super) fn both<'a>(sig: &OpSig, pools: &'a [TensorView]) -> Result<[&'a TensorView; 2]> {
    match pools {
        [keys, .., values] => Ok([keys, values]),
        [keys] => Ok([keys, keys]),
        [] => Err(Error::invalid(format!("wgpu: {}: there are no pools", sig.name()))),
    }
}

impl Planner {
    /// Splits keys and values with pages of `page` elements into parts that fit, and counts their pages.
    pub(super) fn parts(
        &self,
        sig: &OpSig,
        pools: [&TensorView; 2],
        page: u64,
    ) -> Result<(Vec<KvPageRange>, u32)> {
        if page == 0 {
            return Err(Error::invalid(format!("wgpu: {}: a page of the pools holds nothing", sig.name())));
        }
        // keys and values share their indices, so the smaller one bounds them
        let pages = pools.map(|pool| pool.elements() / page);
        let pages = pages[0].min(pages[1]).min(u64::from(u32::MAX));
        let bytes = page * pools[0].dtype.size_bytes();
        let parts = self.runs_of(sig, pages, bytes, 1)?.into_iter().map(|(first, count)| KvPageRange {
            pools: pools.map(|pool| pool.part(first * page, count * page)),
            first: to_u32(first),
            end: to_u32(first + count),
        });
        Ok((parts.collect(), to_u32(pages)))
    }

    pub(super) fn kv(&mut self, sig: &OpSig, operands: &[TensorView]) -> Result<()> {
        let (OpSig::KvWrite { tokens, x: other, kv: shape }
        | OpSig::KvGather { tokens, wire: other, kv: shape }
        | OpSig::KvScatter { tokens, wire: other, kv: shape }) = *sig
        else {
            return Ok(());
        };
        let KvShape { kv_heads, head_dim, page_tokens, dtype: kv, .. } = shape;
        let width = u64::from(kv_heads) * shape.head_elements(other);
        // elements per token outside the pages, and the offset from its keys to its values
        let (row, v_at) = match sig {
            OpSig::KvWrite { .. } => (width, 0),
            _ => (u64::from(shape.pools()) * width, width),
        };
        let (rows, slots, pools) = match (sig, operands) {
            (OpSig::KvWrite { .. }, [k, v, slots, k_pool, v_pool]) => ([k, v], slots, [k_pool, v_pool]),
            (OpSig::KvWrite { .. }, [k, slots, pools @ ..]) => ([k, k], slots, both(sig, pools)?),
            (OpSig::KvScatter { .. }, [wire, slots, pools @ ..]) => ([wire, wire], slots, both(sig, pools)?),
            (OpSig::KvGather { .. }, [slots, pools @ .., out]) => ([out, out], slots, both(sig, pools)?),
            _ => return Ok(()),
        };
        let gather = matches!(sig, OpSig::KvGather { .. });
        let (inputs, output) = if gather { (kv, other) } else { (other, kv) };
        let scaled = kv.is_scaled() || other.is_scaled();
        let kernel = match scaled {
            true => Kernel::new(ShaderFile::KvScaled, "kv_scaled", GROUP).flag("GATHER", gather),
            false => Kernel::new(ShaderFile::Kv, if gather { "kv_gather" } else { "kv_write" }, GROUP)
                .number("POOLS", shape.pools()),
        };
        let kernel = kernel.dtype("D0", inputs).dtype("D1", inputs).dtype("OUT", output);
        let (parts, pages) = self.parts(sig, pools, u64::from(page_tokens) * shape.row())?;
        for (token, count) in self.runs(sig, tokens.into(), row * other.size_bytes())? {
            let rows = rows.map(|operand| operand.part(token * row, count * row));
            let slots = slots.part(token, count);
            for part in &parts {
                let shape =
                    [to_u32(count), kv_heads, head_dim, page_tokens, part.first, part.end, pages, NAN];
                let shape = [&shape[..], &[to_u32(row), to_u32(v_at)]].concat();
                let [k_pool, v_pool] = &part.pools;
                let heads = count * u64::from(kv_heads) * 2;
                if gather {
                    let threads = if scaled { heads } else { words(count * row, other) };
                    let groups = threads.div_ceil(GROUP.into());
                    // the scaled kernel has a second output, which a gather must bind and never writes
                    let outputs = [&rows[0], &rows[1]];
                    let outputs = if scaled { &outputs[..] } else { &outputs[..1] };
                    self.dispatch(&kernel, &[k_pool, v_pool, &slots], outputs, &shape, groups);
                } else {
                    let threads = if scaled { heads } else { words(count * width, kv) };
                    let groups = threads.div_ceil(GROUP.into());
                    self.dispatch(&kernel, &[&rows[0], &rows[1], &slots], &[k_pool, v_pool], &shape, groups);
                }
            }
        }
        Ok(())
    }
}
