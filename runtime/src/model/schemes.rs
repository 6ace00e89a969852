//! Tensor layouts of the published formats of quantised weights.

use super::made::{MadeMatrix, MadePart, SourceTensor};
use super::repack::{self, ZeroPacking};
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::{CodeKind, DType, MatrixKind, Quantised, ScaleKind, WeightFormat, ZeroKind};

/// Groups of weights that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Granularity {
    /// The whole matrix.
    Tensor,
    /// A row: an output feature.
    Channel,
    /// Blocks of rows and columns of this size.
    Block([u32; 2]),
}

/// A published format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scheme {
    /// `weight` E4M3, and a tensor of scales of this name.
    Float8 { granularity: Granularity, scale: &'static str },
    /// compressed-tensors: `weight_packed`, `weight_scale`, and `weight_zero_point` unless symmetric.
    Packed { granularity: Granularity, symmetric: bool },
    /// compressed-tensors: `weight` I8, `weight_scale`, and `weight_zero_point` unless symmetric.
    Int8 { granularity: Granularity, symmetric: bool },
    /// compressed-tensors: `weight_packed`, `weight_scale` E4M3, and a divisor `weight_global_scale`.
    Nvfp4,
    /// compressed-tensors: `weight_packed`, `weight_scale` U8.
    Mxfp4,
    /// `qweight`, `qzeros`, `scales`, with input features as rows.
    Awq { group: Option<u32> },
    /// GPTQ's, with the same tensors.
    Gptq { group: Option<u32> },
}

/// A faulty or missing tensor: its name, and the reason.
pub(super) type Trouble = (String, String);

/// A tensor in a file.
#[derive(Clone, Debug)]
pub(super) struct FoundTensor<'a> {
    pub(super) source: SourceTensor,
    /// The name of its element type in safetensors.
    pub(super) dtype: String,
    pub(super) shape: Vec<u64>,
    pub(super) bytes: &'a [u8],
}

/// Finds the tensors of a module.
struct Module<'a, 'b> {
    name: &'a str,
    find: &'a dyn Fn(&str) -> Option<FoundTensor<'b>>,
}

/// A stored array of a known dtype.
struct Typed {
    source: SourceTensor,
    dtype: DType,
}

impl<'b> Module<'_, 'b> {
    fn find(&self, tensor: &str) -> Option<FoundTensor<'b>> {
        (self.find)(&format!("{}.{tensor}", self.name))
    }

    /// Returns a tensor of one of these dtypes and shapes.
    fn take(&self, tensor: &str, dtypes: &[&str], shapes: &[&[u64]]) -> Result<FoundTensor<'b>, Trouble> {
        let name = format!("{}.{tensor}", self.name);
        let Some(found) = self.find(tensor) else {
            return Err((name, format!("missing, expected {} {:?}", dtypes.join(" or "), shapes[0])));
        };
        let fits = shapes.iter().any(|shape| found.shape == *shape);
        let elements = found.shape.iter().try_fold(1u64, |all, dim| all.checked_mul(*dim));
        let bytes = super::quantisation::element_bytes(&found.dtype);
        let whole = elements.zip(bytes).and_then(|(elements, bytes)| elements.checked_mul(bytes));
        if !fits || !dtypes.contains(&found.dtype.as_str()) || whole != Some(found.source.range.len() as u64)
        {
            let (dtype, shape, bytes) = (&found.dtype, &found.shape, found.source.range.len());
            let expected = dtypes.join(" or ");
            return Err((
                name,
                format!("{dtype} {shape:?} in {bytes} bytes, expected {expected} {:?}", shapes[0]),
            ));
        }
        Ok(found)
    }

    fn floats(&self, tensor: &str, shapes: &[&[u64]]) -> Result<Typed, Trouble> {
        let found = self.take(tensor, &["F32", "BF16", "F16"], shapes)?;
        let dtype = super::quantisation::float_dtype(&found.dtype).unwrap_or(DType::F32);
        Ok(Typed { source: found.source, dtype })
    }
}

impl Granularity {
    /// The rows and columns of a group.
    fn group(self, rows: u32, columns: u32) -> [u32; 2] {
        match self {
            Granularity::Tensor => [rows, columns],
            Granularity::Channel => [1, columns],
            Granularity::Block(block) => block,
        }
    }
}

impl Scheme {
    /// The scheme for costs.
    pub(super) fn format(&self) -> WeightFormat {
        match self {
            Scheme::Float8 { .. } => WeightFormat::Fp8,
            Scheme::Packed { .. } | Scheme::Awq { .. } | Scheme::Gptq { .. } => WeightFormat::Int4,
            Scheme::Int8 { .. } => WeightFormat::Int8,
            Scheme::Nvfp4 => WeightFormat::Nvfp4,
            Scheme::Mxfp4 => WeightFormat::Mxfp4,
        }
    }

    /// The matrix `[rows, columns]` of a module.
    ///
    /// # Errors
    /// The tensor that is missing or differs from the format, and the reason.
    pub(super) fn matrix<'b>(
        &self,
        module: &str,
        (rows, columns): (u32, u32),
        find: &dyn Fn(&str) -> Option<FoundTensor<'b>>,
    ) -> Result<MadeMatrix, Trouble> {
        let module = Module { name: module, find };
        let (kind, parts) = match *self {
            Scheme::Float8 { granularity, scale } => float8(&module, (rows, columns), granularity, scale)?,
            Scheme::Packed { granularity, symmetric } => {
                packed(&module, (rows, columns), granularity, symmetric)?
            }
            Scheme::Int8 { granularity, symmetric } => {
                int8(&module, (rows, columns), granularity, symmetric)?
            }
            Scheme::Nvfp4 => nvfp4(&module, (rows, columns))?,
            Scheme::Mxfp4 => mxfp4(&module, (rows, columns))?,
            Scheme::Awq { group } => transposed(&module, (rows, columns), group, true)?,
            Scheme::Gptq { group } => transposed(&module, (rows, columns), group, false)?,
        };
        let made = MadeMatrix::new(MatrixKind::Quantised(kind), (rows, columns), parts);
        made.map_err(|problem| (format!("{}.weight", module.name), problem))
    }
}

/// The matrices of all experts together, one below the other: `[rows, columns]` in total, of `experts`
/// experts. Quantised ones are stored in their final form, in `NAME_blocks` and `NAME_scales`; others
/// transposed.
///
/// # Errors
/// The tensor that is missing or differs from the format, and the reason.
pub(super) fn fused_experts<'b>(
    scheme: Option<&Scheme>,
    name: &str,
    (experts, rows, columns): (u32, u32, u32),
    find: &dyn Fn(&str) -> Option<FoundTensor<'b>>,
) -> Result<MadeMatrix, Trouble> {
    let (at, matrix) = name.rsplit_once('.').unwrap_or(("", name));
    let module = Module { name: at, find };
    let [count, of_each, wide] = [experts, rows / experts.max(1), columns].map(u64::from);
    let (kind, parts) = match scheme {
        Some(Scheme::Mxfp4) => {
            let groups = wide.div_ceil(32);
            let codes =
                module.take(&format!("{matrix}_blocks"), &["U8"], &[&[count, of_each, groups, 16]])?;
            let scales = module.take(&format!("{matrix}_scales"), &["U8"], &[&[count, of_each, groups]])?;
            let parts = vec![MadePart::InPlace(codes.source), MadePart::made(&scales.source, repack::powers)];
            (MatrixKind::Quantised(Quantised::MXFP4), parts)
        }
        Some(_) => {
            let problem = "experts with weights of this format are not supported; supported: mxfp4";
            return Err((name.to_owned(), problem.to_owned()));
        }
        None => {
            let stored = module.floats(matrix, &[&[count, wide, of_each]])?;
            let (element, rows) = (to_usize(stored.dtype.size_bytes()), to_usize(wide));
            let each = to_usize(wide * of_each) * element;
            let how = move |bytes: &[u8]| {
                bytes.chunks(each.max(1)).flat_map(|one| repack::transposed(one, rows, element)).collect()
            };
            (MatrixKind::Plain(stored.dtype), vec![MadePart::made(&stored.source, how)])
        }
    };
    MadeMatrix::new(kind, (rows, columns), parts).map_err(|problem| (name.to_owned(), problem))
}

type Made = (Quantised, Vec<MadePart>);

fn kind(code: CodeKind, [group_rows, group_columns]: [u32; 2], scale: DType, zero: ZeroKind) -> Quantised {
    let scale = ScaleKind::of(scale).unwrap_or(ScaleKind::F32);
    Quantised { code, group_rows, group_columns, scale, zero, outer: false }
}

/// Valid shapes of a tensor of scales: `[groups of rows, groups of columns]`, or fewer dimensions where one
/// of them is 1.
fn scale_shapes(rows: u32, columns: u32, [group_rows, group_columns]: [u32; 2]) -> Vec<Vec<u64>> {
    let (down, across) = (u64::from(rows.div_ceil(group_rows)), u64::from(columns.div_ceil(group_columns)));
    let mut shapes = vec![vec![down, across]];
    if across == 1 {
        shapes.push(vec![down]);
    }
    if down == 1 && across == 1 {
        shapes.push(Vec::new());
    }
    shapes
}

fn scales(
    module: &Module,
    name: &str,
    (rows, columns): (u32, u32),
    group: [u32; 2],
) -> Result<Typed, Trouble> {
    let shapes = scale_shapes(rows, columns, group);
    let shapes: Vec<&[u64]> = shapes.iter().map(|shape| shape.as_slice()).collect();
    module.floats(name, &shapes)
}

fn float8(
    module: &Module,
    (rows, columns): (u32, u32),
    granularity: Granularity,
    scale: &str,
) -> Result<Made, Trouble> {
    let codes = module.take("weight", &["F8_E4M3"], &[&[u64::from(rows), u64::from(columns)]])?;
    // a scale per row may be stored as a single scale
    let is_one = |found: FoundTensor<'_>| found.shape.iter().product::<u64>() == 1;
    let single = granularity == Granularity::Channel && module.find(scale).is_some_and(is_one);
    let granularity = if single { Granularity::Tensor } else { granularity };
    let group = granularity.group(rows, columns);
    let scales = scales(module, scale, (rows, columns), group)?;
    let kind = kind(CodeKind::E4m3, group, scales.dtype, ZeroKind::Middle);
    Ok((kind, vec![MadePart::InPlace(codes.source), MadePart::InPlace(scales.source)]))
}

fn packed(
    module: &Module,
    (rows, columns): (u32, u32),
    granularity: Granularity,
    symmetric: bool,
) -> Result<Made, Trouble> {
    let words = u64::from(columns.div_ceil(8));
    let codes = module.take("weight_packed", &["I32"], &[&[u64::from(rows), words]])?;
    let group = granularity.group(rows, columns);
    let scales = scales(module, "weight_scale", (rows, columns), group)?;
    let mut parts = vec![MadePart::InPlace(codes.source), MadePart::InPlace(scales.source)];
    if symmetric {
        return Ok((kind(CodeKind::U4, group, scales.dtype, ZeroKind::Middle), parts));
    }
    let (down, across) = (rows.div_ceil(group[0]), columns.div_ceil(group[1]));
    let shape = [u64::from(down.div_ceil(8)), u64::from(across)];
    let zeros = module.take("weight_zero_point", &["I32"], &[&shape])?;
    let (size, dtype) = ((down as usize, across as usize), scales.dtype);
    let how = move |bytes: &[u8]| repack::zero_points(bytes, ZeroPacking::Rows, size, dtype);
    parts.push(MadePart::made(&zeros.source, how));
    Ok((kind(CodeKind::U4, group, dtype, ZeroKind::Points), parts))
}

fn int8(
    module: &Module,
    (rows, columns): (u32, u32),
    granularity: Granularity,
    symmetric: bool,
) -> Result<Made, Trouble> {
    let codes = module.take("weight", &["I8"], &[&[u64::from(rows), u64::from(columns)]])?;
    let group = granularity.group(rows, columns);
    let scales = scales(module, "weight_scale", (rows, columns), group)?;
    let mut parts = vec![MadePart::InPlace(codes.source), MadePart::InPlace(scales.source)];
    if symmetric {
        return Ok((kind(CodeKind::I8, group, scales.dtype, ZeroKind::Middle), parts));
    }
    let shapes = scale_shapes(rows, columns, group);
    let shapes: Vec<&[u64]> = shapes.iter().map(|shape| shape.as_slice()).collect();
    let zeros = module.take("weight_zero_point", &["I8"], &shapes)?;
    let dtype = scales.dtype;
    let how = move |bytes: &[u8]| {
        let mut out = Vec::new();
        bytes.iter().for_each(|byte| dtype.encode(f64::from(byte.cast_signed()), &mut out));
        out
    };
    parts.push(MadePart::made(&zeros.source, how));
    Ok((kind(CodeKind::I8, group, dtype, ZeroKind::Points), parts))
}

fn nvfp4(module: &Module, (rows, columns): (u32, u32)) -> Result<Made, Trouble> {
    let (rows, columns) = (u64::from(rows), u64::from(columns));
    let codes = module.take("weight_packed", &["U8"], &[&[rows, columns.div_ceil(2)]])?;
    let scales = module.take("weight_scale", &["F8_E4M3"], &[&[rows, columns.div_ceil(16)]])?;
    let outer = module.take("weight_global_scale", &["F32"], &[&[1], &[]])?;
    let parts = vec![
        MadePart::InPlace(codes.source),
        MadePart::InPlace(scales.source),
        MadePart::made(&outer.source, repack::reciprocals),
    ];
    Ok((Quantised::NVFP4, parts))
}

fn mxfp4(module: &Module, (rows, columns): (u32, u32)) -> Result<Made, Trouble> {
    let (rows, columns) = (u64::from(rows), u64::from(columns));
    let codes = module.take("weight_packed", &["U8"], &[&[rows, columns.div_ceil(2)]])?;
    let scales = module.take("weight_scale", &["U8", "F8_E8M0"], &[&[rows, columns.div_ceil(32)]])?;
    Ok((
        Quantised::MXFP4,
        vec![MadePart::InPlace(codes.source), MadePart::made(&scales.source, repack::powers)],
    ))
}

/// AWQ and GPTQ, whose tensors have input features as rows.
fn transposed(
    module: &Module,
    (rows, columns): (u32, u32),
    group: Option<u32>,
    is_awq: bool,
) -> Result<Made, Trouble> {
    let group = group.unwrap_or(columns);
    let (outputs, inputs) = (u64::from(rows), u64::from(columns));
    let groups = inputs.div_ceil(u64::from(group));
    let shape = if is_awq { [inputs, outputs.div_ceil(8)] } else { [inputs.div_ceil(8), outputs] };
    let codes = module.take("qweight", &["I32"], &[&shape])?;
    let zeros = module.take("qzeros", &["I32"], &[&[groups, outputs.div_ceil(8)]])?;
    let scales = module.floats("scales", &[&[groups, outputs]])?;
    if !is_awq && module.find("g_idx").is_some() {
        let groups = module.take("g_idx", &["I32"], &[&[inputs]])?;
        let is_next = |(input, group_of): (u32, &[u8])| group_of == (input / group).to_le_bytes();
        if !(0..).zip(groups.bytes.chunks(4)).all(is_next) {
            let problem = format!(
                "inputs are not in the order of their groups of {group} (desc_act: true), expected the first \
                 {group} in group 0, and so on (desc_act: false)"
            );
            return Err((format!("{}.g_idx", module.name), problem));
        }
    }
    if is_awq && (!outputs.is_multiple_of(8) || !inputs.is_multiple_of(8)) {
        let problem = format!("{outputs} x {inputs} weights of AWQ, expected multiples of 8");
        return Err((format!("{}.qweight", module.name), problem));
    }
    let (rows, columns, groups) = (rows as usize, columns as usize, to_usize(groups));
    let (dtype, packing) = (scales.dtype, if is_awq { ZeroPacking::Awq } else { ZeroPacking::GptqLessOne });
    let element = to_usize(dtype.size_bytes());
    let codes = match is_awq {
        true => MadePart::made(&codes.source, move |bytes| repack::awq_codes(bytes, columns)),
        false => {
            MadePart::made(&codes.source, move |bytes| repack::transposed(bytes, columns.div_ceil(8), 4))
        }
    };
    let parts = vec![
        codes,
        MadePart::made(&scales.source, move |bytes| repack::transposed(bytes, groups, element)),
        MadePart::made(&zeros.source, move |bytes| {
            repack::zero_points(bytes, packing, (rows, groups), dtype)
        }),
    ];
    Ok((kind(CodeKind::U4, [1, group], dtype, ZeroKind::Points), parts))
}

#[cfg(test)]
#[path = "schemes_tests.rs"]
mod tests;
