//! Curves as inline SVG that follows the page's colours.
//!
//! ```
//! use mixfleet_report::svg::{Chart, Limit, Mark, PlotAxis, Scale, Series};
//! let load = Series { name: "load".into(), points: vec![(0.0, 0.2), (60.0, 1.4)], mark: Mark::Line };
//! let x = PlotAxis { label: "time in s", unit: "", scale: Scale::Linear };
//! let y = PlotAxis { label: "load", ..x };
//! let chart = Chart { x, y, series: &[load], roof: &[], limits: &[Limit::Y(1.0, "objective")] };
//! let drawing = chart.drawing().expect("there is something to draw");
//! assert!(drawing.svg.starts_with("<svg") && drawing.svg.contains("objective"));
//! ```

use crate::html::{Drawing, Html, TableCell, escape};
use crate::numbers::{scaled, size};
use mixfleet_hal::cast::{to_i32, to_u32, to_u64, to_usize};
use std::fmt::Write as _;

/// Height without the legend, which is below.
const HEIGHT: f64 = 330.0;
const RIGHT: f64 = 20.0;
const BOTTOM: f64 = 44.0;
/// Margin of a fitted axis, as a share of the values' range.
const MARGIN: f64 = 0.12;
/// Sizes of a drawing for wide windows, and for phones, where text keeps its size.
const WIDE: ChartFrame = ChartFrame { width: 860.0, left: 94.0, top: 14.0, ticks: 8, is_narrow: false };
const NARROW: ChartFrame = ChartFrame { width: 350.0, left: 80.0, top: 26.0, ticks: 4, is_narrow: true };
/// Colours of the style sheet.
const COLOURS: usize = 6;
/// Number of series that differ from each other in their marks and lines.
pub const DISTINCT_MAX: usize = COLOURS * COLOURS;
/// Line patterns, one for each round of colours.
const DASHES: [&str; COLOURS] = ["", "7 3", "2 3", "9 3 2 3", "14 4", "9 3 2 3 2 3"];
/// Upper estimate of the width of a character of the legend's font.
const CHARACTER: f64 = 7.6;
/// Width of a legend entry beside its name, and the height of a row of entries.
const ENTRY: (f64, f64) = (44.0, 18.0);
/// Number of points of a series that tell their values, in the drawing and in the table.
const TOLD_MAX: usize = 60;

/// The space of a drawing.
#[derive(Clone, Copy, Debug)]
struct ChartFrame {
    width: f64,
    left: f64,
    top: f64,
    /// Most ticks of the horizontal axis.
    ticks: i32,
    is_narrow: bool,
}

impl ChartFrame {
    fn right(&self) -> f64 {
        self.width - RIGHT
    }
}

/// How a curve is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// A line without markers.
    Line,
    /// Markers without a line.
    Dots,
    /// A line with markers.
    Both,
    /// One value with its error: the points are its lower end, the value and its upper end, at one x.
    Range,
    /// The same, marked as the one that was chosen.
    Chosen,
}

impl Mark {
    fn has_line(self) -> bool {
        matches!(self, Mark::Line | Mark::Both)
    }

    fn is_range(self) -> bool {
        matches!(self, Mark::Range | Mark::Chosen)
    }
}

/// One curve of (x, y) points.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Label in the legend.
    pub name: String,
    /// Points in ascending x; non-finite ones, and non-positive ones on a logarithmic axis, are left out.
    pub points: Vec<(f64, f64)>,
    /// How the curve is drawn.
    pub mark: Mark,
}

/// The scale of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Linear, starting at 0.
    Linear,
    /// Linear over the values and limits, for values that differ by little.
    Fitted,
    /// Logarithmic, with ticks at powers of ten.
    Decimal,
    /// Logarithmic, with ticks at powers of two.
    Binary,
}

/// The label, unit and scale of an axis.
#[derive(Clone, Copy, Debug)]
pub struct PlotAxis {
    /// Label of the axis.
    pub label: &'static str,
    /// Unit, which gets an SI prefix as needed; `""` means plain numbers.
    pub unit: &'static str,
    /// Scale of the axis.
    pub scale: Scale,
}

/// A named line across the chart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limit {
    /// A vertical line at this x.
    X(f64, &'static str),
    /// A horizontal line at this y.
    Y(f64, &'static str),
}

/// Curves on a pair of axes, with a legend below.
#[derive(Clone, Copy, Debug)]
pub struct Chart<'a> {
    /// The horizontal axis.
    pub x: PlotAxis,
    /// The vertical axis.
    pub y: PlotAxis,
    /// The curves, each with its own colour.
    pub series: &'a [Series],
    /// A colourless curve below the others; may be empty.
    pub roof: &'a [(f64, f64)],
    /// Lines across the chart.
    pub limits: &'a [Limit],
}

/// The range of an axis (of logarithms unless linear) and its position in the drawing.
struct AxisSpan {
    scale: Scale,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl AxisSpan {
    /// Covers `values` with a small margin; `None` if none can be shown.
    fn over(scale: Scale, values: impl Iterator<Item = f64>, from: f64, to: f64) -> Option<AxisSpan> {
        let (low, high) = values
            .filter(|&value| shows(scale, value))
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
        let (low, high) = match scale {
            _ if high < low => return None,
            Scale::Linear => (0.0, if high > 0.0 { high * 1.05 } else { 1.0 }),
            Scale::Fitted => {
                let range = if high > low { high - low } else { high.abs().max(1e-9) };
                (low - MARGIN * range, high + MARGIN * range)
            }
            Scale::Decimal | Scale::Binary => ((low / 1.25).ln(), (high * 1.25).ln()),
        };
        Some(AxisSpan { scale, low, high, from, to })
    }

    fn at(&self, value: f64) -> f64 {
        let value = if self.scale.is_linear() { value } else { value.ln() };
        self.from + (value - self.low) / (self.high - self.low) * (self.to - self.from)
    }

    fn contains(&self, value: f64) -> bool {
        let value = if self.scale.is_linear() { value } else { value.ln() };
        (self.low..=self.high).contains(&value)
    }

    /// Returns at most about this many round values inside.
    fn ticks(&self, most: i32) -> Vec<f64> {
        let base: f64 = match self.scale {
            Scale::Linear | Scale::Fitted => return self.linear_ticks(most),
            Scale::Decimal => 10.0,
            Scale::Binary => 2.0,
        };
        let power = |value: f64| value / base.ln();
        let (first, last) = (to_i32(power(self.low).ceil()), to_i32(power(self.high).floor()));
        let step = ((last - first) / most + 1).max(1);
        let mut ticks: Vec<f64> = (first..=last).step_by(to_usize(step)).map(|e| base.powi(e)).collect();
        if self.scale == Scale::Decimal && ticks.len() < 3 {
            let halves = (first - 1..=last).flat_map(|e| [1.0, 2.0, 5.0].map(|m| m * base.powi(e)));
            ticks = halves.filter(|&tick| self.contains(tick)).collect();
        }
        ticks
    }

    fn linear_ticks(&self, most: i32) -> Vec<f64> {
        let least = (self.high - self.low) / f64::from(most);
        let power = 10f64.powf(least.log10().floor());
        let step = [1.0, 2.0, 5.0].map(|m| m * power).into_iter().find(|step| *step >= least);
        let step = step.unwrap_or(10.0 * power);
        let first = (self.low / step).ceil();
        (0..=to_u32((self.high / step - first).max(0.0))).map(|i| (first + f64::from(i)) * step).collect()
    }
}

impl Scale {
    fn is_linear(self) -> bool {
        matches!(self, Scale::Linear | Scale::Fitted)
    }
}

/// Whether a value can be shown on such an axis.
fn shows(scale: Scale, value: f64) -> bool {
    value.is_finite() && (value > 0.0 || (scale.is_linear() && value == 0.0))
}

impl Chart<'_> {
    /// Appends the chart with its caption and its numbers, or nothing if there is nothing to draw.
    pub fn draw(&self, body: &mut Html, caption: &str) {
        if let Some(drawing) = self.drawing() {
            body.figure(&drawing, caption);
        }
    }

    /// Renders the chart as SVG for wide and narrow windows, and as a table; `None` without points.
    pub fn drawing(&self) -> Option<Drawing> {
        let shown: Vec<Vec<(f64, f64)>> = self.series.iter().map(|s| self.shown(&s.points)).collect();
        let [svg, narrow] = [WIDE, NARROW].map(|frame| self.framed(frame, &shown));
        Some(Drawing {
            svg: svg?,
            narrow: narrow?,
            label: self.label(),
            header: self.header(),
            rows: self.rows(&shown),
        })
    }

    fn label(&self) -> String {
        format!("{} over {}", self.y.label, self.x.label)
    }

    fn framed(&self, frame: ChartFrame, shown: &[Vec<(f64, f64)>]) -> Option<String> {
        let Chart { x, y, series, roof, limits } = *self;
        let roof = self.shown(roof);
        let values = |of: fn(&(f64, f64)) -> f64, scale: Scale, limit: fn(&Limit) -> Option<f64>| {
            let fitted = limits.iter().filter_map(limit).filter(move |_| scale == Scale::Fitted);
            let all: Vec<f64> = shown.iter().flatten().chain(&roof).map(of).collect();
            let limits: Vec<f64> = fitted.filter(|_| !all.is_empty()).collect();
            all.into_iter().chain(limits)
        };
        let across =
            values(|p| p.0, x.scale, |limit| if let Limit::X(at, _) = limit { Some(*at) } else { None });
        let up = values(|p| p.1, y.scale, |limit| if let Limit::Y(at, _) = limit { Some(*at) } else { None });
        let horizontal = AxisSpan::over(x.scale, across, frame.left, frame.right())?;
        let vertical = AxisSpan::over(y.scale, up, HEIGHT - BOTTOM, frame.top)?;
        let spans = Spans { frame, horizontal, vertical };
        let legend = Legend::of(series, frame);
        let mut svg = format!(
            "<svg viewBox=\"0 0 {} {:.0}\" role=\"img\" aria-label=\"{}\">",
            frame.width,
            HEIGHT + legend.height(series.len()),
            escape(&self.label())
        );
        spans.axes(&mut svg, x, y);
        if roof.len() > 1 {
            let points = spans.path(&roof);
            let _ = write!(svg, "<polyline class=\"roof\" points=\"{points}\"/>");
        }
        for (i, (series, points)) in series.iter().zip(shown).enumerate() {
            self.curve(&mut svg, i, series, points, &spans);
            legend.entry(&mut svg, i, series);
        }
        for limit in limits {
            spans.line(&mut svg, *limit);
        }
        svg.push_str("</svg>");
        Some(svg)
    }

    fn shown(&self, points: &[(f64, f64)]) -> Vec<(f64, f64)> {
        let inside = |p: &&(f64, f64)| shows(self.x.scale, p.0) && shows(self.y.scale, p.1);
        points.iter().filter(inside).copied().collect()
    }

    fn header(&self) -> Vec<String> {
        vec!["series".to_owned(), self.x.label.to_owned(), self.y.label.to_owned()]
    }

    fn rows(&self, shown: &[Vec<(f64, f64)>]) -> Vec<Vec<TableCell>> {
        let mut rows = Vec::new();
        for (series, points) in self.series.iter().zip(shown) {
            if let (true, [low, value, high]) = (series.mark.is_range(), &points[..]) {
                let [low, high] = [low, high].map(|p| tick_text(self.y, p.1));
                let y = format!("{} ({low} to {high})", tick_text(self.y, value.1));
                let x = TableCell::number(tick_text(self.x, value.0));
                rows.push(vec![TableCell::text(&series.name), x, TableCell::number(y)]);
                continue;
            }
            rows.extend(told(points).map(|p| {
                let numbers = [tick_text(self.x, p.0), tick_text(self.y, p.1)];
                let mut row = vec![TableCell::text(&series.name)];
                row.extend(numbers.map(TableCell::number));
                row
            }));
        }
        rows
    }

    /// Draws the `i`th curve. Each labelled point has its values as a title, which browsers show.
    fn curve(&self, svg: &mut String, i: usize, series: &Series, points: &[(f64, f64)], spans: &Spans) {
        let (colour, name) = (colour(i), escape(&series.name));
        if series.mark.has_line() && points.len() > 1 {
            let path = spans.path(points);
            let _ = write!(
                svg,
                "<polyline points=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{}>\
                 <title>{name}</title></polyline>",
                dash(i)
            );
        }
        let values = |p: &(f64, f64)| {
            let (x, y) = (tick_text(self.x, p.0), tick_text(self.y, p.1));
            format!("<title>{name}: {}, {}</title>", escape(&x), escape(&y))
        };
        if let (true, [low, value, high]) = (series.mark.is_range(), points) {
            let ((x, from), (_, to)) = (spans.place(low), spans.place(high));
            let _ = write!(
                svg,
                "<path d=\"M{x:.1},{from:.1} V{to:.1} M{:.1},{from:.1} h10 M{:.1},{to:.1} h10\" fill=\"none\" \
                 stroke=\"{colour}\" stroke-width=\"1.5\"/>",
                x - 5.0,
                x - 5.0
            );
            let (x, y) = spans.place(value);
            svg.push_str(&marker(i, x, y, 5.0, &values(value)));
            if series.mark == Mark::Chosen {
                spans.chosen(svg, x, y);
            }
        } else if series.mark == Mark::Line && points.len() > 1 {
            // a finger does not hover
            for p in told(points).filter(|_| !spans.frame.is_narrow) {
                let (cx, cy) = spans.place(p);
                let _ = write!(
                    svg,
                    "<circle class=\"spot\" cx=\"{cx:.1}\" cy=\"{cy:.1}\" r=\"6\">{}</circle>",
                    values(p)
                );
            }
        } else {
            // a point on its own is no part of a curve that shows where to look
            let radius = if points.len() == 1 { 5.0 } else { 3.2 };
            for p in points {
                let (x, y) = spans.place(p);
                svg.push_str(&marker(i, x, y, radius, &values(p)));
            }
        }
    }
}

/// Returns points at even distances, the first and the last one among them.
fn told(points: &[(f64, f64)]) -> impl Iterator<Item = &(f64, f64)> {
    let every = points.len().div_ceil(TOLD_MAX).max(1);
    let last = points.len().saturating_sub(1);
    points.iter().enumerate().filter(move |(i, _)| i % every == 0 || *i == last).map(|(_, p)| p)
}

fn colour(i: usize) -> String {
    format!("var(--s{})", i % COLOURS)
}

fn dash(i: usize) -> String {
    match DASHES[i / COLOURS % COLOURS] {
        "" => String::new(),
        dashes => format!(" stroke-dasharray=\"{dashes}\""),
    }
}

/// Returns the mark of the `i`th series. Neighbours differ in form too, for readers who cannot see colours.
fn marker(i: usize, x: f64, y: f64, r: f64, inside: &str) -> String {
    let colour = colour(i);
    let outline = match (i + i / COLOURS) % COLOURS {
        0 => {
            return format!(
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{r}\" fill=\"{colour}\">{inside}</circle>"
            );
        }
        1 => vec![(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
        2 => vec![(0.0, -1.3), (1.2, 0.9), (-1.2, 0.9)],
        3 => vec![(0.0, -1.4), (1.4, 0.0), (0.0, 1.4), (-1.4, 0.0)],
        4 => vec![(0.0, 1.3), (1.2, -0.9), (-1.2, -0.9)],
        _ => {
            let arm = [(-0.4, -1.4), (0.4, -1.4), (0.4, -0.4), (1.4, -0.4), (1.4, 0.4), (0.4, 0.4)];
            arm.into_iter().chain(arm.map(|(x, y)| (-x, -y))).collect()
        }
    };
    let corners = outline.iter().map(|(dx, dy)| format!("{:.1},{:.1}", x + dx * r, y + dy * r));
    let corners: Vec<String> = corners.collect();
    format!("<polygon points=\"{}\" fill=\"{colour}\">{inside}</polygon>", corners.join(" "))
}

/// The positions of the series' names: in columns as wide as the longest name.
struct Legend {
    left: f64,
    columns: usize,
    width: f64,
}

impl Legend {
    fn of(series: &[Series], frame: ChartFrame) -> Legend {
        let longest = series.iter().map(|series| series.name.chars().count()).max().unwrap_or(0);
        let left = if frame.is_narrow { 4.0 } else { frame.left };
        let all = frame.right() - left;
        let width = (ENTRY.0 + CHARACTER * longest as f64).min(all);
        Legend { left, columns: to_usize(to_u32((all / width).floor()).max(1)), width }
    }

    fn height(&self, entries: usize) -> f64 {
        ENTRY.1 * entries.div_ceil(self.columns) as f64
    }

    fn entry(&self, svg: &mut String, i: usize, series: &Series) {
        let (x, y) = (
            self.left + self.width * (i % self.columns) as f64,
            HEIGHT + 4.0 + ENTRY.1 * (i / self.columns) as f64,
        );
        let _ = write!(
            svg,
            "<g><title>{}</title><line x1=\"{x:.1}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"{}\" \
             stroke-width=\"{}\"{}/>",
            escape(&series.name),
            x + 28.0,
            colour(i),
            if series.mark.has_line() { 2 } else { 0 },
            dash(i)
        );
        if series.mark != Mark::Line || series.points.len() == 1 {
            svg.push_str(&marker(i, x + 14.0, y, 4.0, ""));
        }
        // the width was made of whole characters, and rounding is not to take one
        let room = to_usize(to_u32((self.width - ENTRY.0) / CHARACTER + 1e-6));
        let name = shortened(&series.name, room);
        let _ = write!(svg, "<text x=\"{:.1}\" y=\"{:.1}\">{}</text></g>", x + 34.0, y + 4.0, escape(&name));
    }
}

/// Returns a name of at most `room` characters, which ends with an ellipsis if it was longer.
pub(crate) fn shortened(name: &str, room: usize) -> String {
    if name.chars().count() <= room {
        return name.to_owned();
    }
    name.chars().take(room.saturating_sub(1)).chain(['…']).collect()
}

/// Both axes in their frame.
struct Spans {
    frame: ChartFrame,
    horizontal: AxisSpan,
    vertical: AxisSpan,
}

impl Spans {
    fn place(&self, p: &(f64, f64)) -> (f64, f64) {
        (self.horizontal.at(p.0), self.vertical.at(p.1))
    }

    fn path(&self, points: &[(f64, f64)]) -> String {
        let place = |p: &(f64, f64)| {
            let (x, y) = self.place(p);
            format!("{x:.1},{y:.1}")
        };
        points.iter().map(place).collect::<Vec<_>>().join(" ")
    }

    /// Draws a ring and a word at the point that was chosen.
    fn chosen(&self, svg: &mut String, x: f64, y: f64) {
        let is_left = x + 70.0 > self.frame.right();
        let (at, anchor) = if is_left { (x - 14.0, "end") } else { (x + 14.0, "start") };
        let _ = write!(
            svg,
            "<path class=\"roof\" d=\"M{:.1},{y:.1} a10,10 0 1 0 20,0 a10,10 0 1 0 -20,0\"/>\
             <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">chosen</text>",
            x - 10.0,
            y + 4.0
        );
    }

    /// Draws a limit if it is inside the plot.
    fn line(&self, svg: &mut String, limit: Limit) {
        let ChartFrame { left, top, .. } = self.frame;
        let (right, bottom) = (self.frame.right(), HEIGHT - BOTTOM);
        let (at, name) = match limit {
            Limit::X(x, name) if self.horizontal.contains(x) => {
                let at = self.horizontal.at(x);
                let _ = write!(
                    svg,
                    "<path class=\"roof\" stroke-dasharray=\"2 4\" d=\"M{at:.1},{top} V{bottom}\"/>"
                );
                let width = CHARACTER * name.chars().count() as f64;
                let at = if at + 4.0 + width > right { (at - 4.0 - width).max(0.0) } else { at + 4.0 };
                ((at, top + 10.0), name)
            }
            Limit::Y(y, name) if self.vertical.contains(y) => {
                let at = self.vertical.at(y);
                let _ = write!(
                    svg,
                    "<path class=\"roof\" stroke-dasharray=\"2 4\" d=\"M{left},{at:.1} H{right}\"/>"
                );
                ((left + 4.0, at - 4.0), name)
            }
            Limit::X(..) | Limit::Y(..) => return,
        };
        let _ = write!(svg, "<text x=\"{:.1}\" y=\"{:.1}\">{}</text>", at.0, at.1, escape(name));
    }

    fn axes(&self, svg: &mut String, x: PlotAxis, y: PlotAxis) {
        let ChartFrame { left, top, ticks, is_narrow, .. } = self.frame;
        let (right, bottom) = (self.frame.right(), HEIGHT - BOTTOM);
        for tick in self.horizontal.ticks(ticks) {
            let at = self.horizontal.at(tick);
            let _ = write!(
                svg,
                "<line class=\"grid\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{top}\" y2=\"{bottom}\"/>\
                 <text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
                bottom + 16.0,
                tick_text(x, tick)
            );
        }
        for tick in self.vertical.ticks(WIDE.ticks) {
            let at = self.vertical.at(tick);
            let _ = write!(
                svg,
                "<line class=\"grid\" x1=\"{left}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
                 <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                left - 6.0,
                at + 4.0,
                tick_text(y, tick)
            );
        }
        let _ = write!(
            svg,
            "<path class=\"axis\" d=\"M{left},{top} V{bottom} H{right}\"/>\
             <text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            (left + right) / 2.0,
            HEIGHT - 6.0,
            escape(x.label)
        );
        let middle = (top + bottom) / 2.0;
        let name = escape(y.label);
        let _ = match is_narrow {
            true => write!(svg, "<text x=\"4\" y=\"14\">{name}</text>"),
            false => write!(
                svg,
                "<text x=\"14\" y=\"{middle}\" text-anchor=\"middle\" \
                 transform=\"rotate(-90 14 {middle})\">{name}</text>"
            ),
        };
    }
}

fn tick_text(axis: PlotAxis, value: f64) -> String {
    if axis.scale == Scale::Binary && axis.unit == "B" {
        return size(to_u64(value.round()));
    }
    if axis.unit.is_empty() {
        let rounded = (value * 1e4).round() / 1e4;
        return if rounded == 0.0 && value != 0.0 { format!("{value:.2e}") } else { format!("{rounded}") };
    }
    scaled(value, axis.unit).replace(".00 ", " ").replace(".0 ", " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: PlotAxis = PlotAxis { label: "working set", unit: "B", scale: Scale::Binary };
    const RATE: PlotAxis = PlotAxis { label: "rate", unit: "B/s", scale: Scale::Decimal };
    const TIME: PlotAxis = PlotAxis { label: "time", unit: "", scale: Scale::Linear };

    fn chart(x: PlotAxis, y: PlotAxis, series: &[Series], limits: &[Limit]) -> String {
        let drawing = Chart { x, y, series, roof: &[], limits }.drawing();
        drawing.map(|drawing| drawing.svg).unwrap_or_default()
    }

    #[test]
    fn points_lie_inside_and_names_are_escaped() {
        let points = vec![(65536.0, 1e11), (1e6, 9e10), (5e8, 3e10)];
        let series = [Series { name: "read <b>".into(), points, mark: Mark::Both }];
        let svg = chart(BYTES, RATE, &series, &[]);
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>") && svg.contains("read &lt;b&gt;"));
        assert_eq!(svg.matches("<circle").count(), 4, "three points, and one in the legend");
        for coordinate in svg.split("cx=\"").skip(1) {
            let x: f64 = coordinate.split('"').next().unwrap().parse().unwrap();
            assert!((WIDE.left..=WIDE.right()).contains(&x), "{x}");
        }
        assert!(svg.contains("64KiB") || svg.contains("256KiB"), "{svg}");
        // Both axes are labelled, and the ticks have their units.
        assert!(svg.contains(">working set</text>") && svg.contains(">rate</text>"), "{svg}");
        assert!(svg.contains("GB/s<"), "{svg}");
    }

    #[test]
    fn a_linear_axis_begins_at_zero_and_a_limit_shows_where_it_is_inside() {
        let points = vec![(0.0, 0.0), (f64::NAN, 1.0), (600.0, 3.7)];
        let series = [Series { name: "load".into(), points, mark: Mark::Line }];
        let svg =
            chart(TIME, TIME, &series, &[Limit::Y(1.0, "in"), Limit::Y(9.0, "out"), Limit::X(-1.0, "left")]);
        assert!(svg.contains(&format!("points=\"{:.1},{:.1} ", WIDE.left, HEIGHT - BOTTOM)), "{svg}");
        let spots = svg.matches("<circle class=\"spot\"").count();
        assert_eq!((svg.matches("<circle").count() - spots, spots, svg.matches("NaN").count()), (0, 2, 0));
        assert!(svg.contains(">in<") && !svg.contains(">out<") && !svg.contains(">left<"));
        for tick in ["100", "600", "0.5", "3.5"] {
            assert!(svg.contains(&format!(">{tick}<")), "{tick}: {svg}");
        }
        let still = [Series { name: "none".into(), points: vec![(1.0, 0.0), (2.0, 0.0)], mark: Mark::Line }];
        assert!(chart(TIME, TIME, &still, &[]).contains("<polyline"));
    }

    #[test]
    fn as_many_series_are_told_apart_as_there_may_be() {
        let looks = |i: usize| (marker(i, 0.0, 0.0, 3.0, ""), colour(i) + &dash(i));
        for i in 0..DISTINCT_MAX {
            for j in 0..i {
                assert!(looks(i).0 != looks(j).0 && looks(i).1 != looks(j).1, "{i} and {j}");
            }
        }
    }

    #[test]
    fn legends_lie_inside_whatever_their_names() {
        let series = |name: &str| Series { name: name.into(), points: vec![(1.0, 1.0)], mark: Mark::Both };
        let some: Vec<Series> = (0..20).map(|i| series(&format!("a curve of some length {i}"))).collect();
        for series in [&some[..], &[series(&"x".repeat(300))]] {
            let drawing = Chart { x: TIME, y: TIME, series, roof: &[], limits: &[] }.drawing().unwrap();
            let svg = &drawing.svg;
            let height: f64 =
                svg.split("viewBox=\"0 0 860 ").nth(1).unwrap().split('"').next().unwrap().parse().unwrap();
            for entry in svg.split("<g>").skip(1) {
                let text = entry.split("<text x=\"").nth(1).unwrap();
                let number = |text: &str| text.split('"').next().unwrap().parse::<f64>().unwrap();
                let (x, y) = (number(text), number(text.split("y=\"").nth(1).unwrap()));
                let name = text.split('>').nth(1).unwrap().trim_end_matches("</text");
                assert!(
                    x + CHARACTER * name.chars().count() as f64 <= WIDE.width && y < height,
                    "{x} {y} {name}"
                );
            }
            assert_eq!(drawing.rows.len(), series.len(), "each point is in the table");
            assert_eq!(svg.contains('…'), series.len() == 1, "only names without room are cut");
        }
    }

    #[test]
    fn a_point_alone_is_larger_and_long_curves_tell_some_of_their_points() {
        let one = [Series { name: "one".into(), points: vec![(1.0, 1.0)], mark: Mark::Line }];
        assert!(chart(TIME, TIME, &one, &[]).contains("r=\"5\""));
        let points: Vec<(f64, f64)> = (0..1000).map(|i| (f64::from(i), 2.0)).collect();
        let some: Vec<_> = told(&points).collect();
        assert!(some.len() <= TOLD_MAX + 1, "{}", some.len());
        assert_eq!((some[0].0, some[some.len() - 1].0), (0.0, 999.0));
    }

    #[test]
    fn a_range_has_whiskers_and_the_chosen_one_a_ring_inside_both_frames() {
        let series: Vec<Series> = [(10.0, Mark::Chosen), (11.0, Mark::Range)]
            .map(|(x, mark)| Series {
                name: format!("fleet at {x}"),
                points: vec![(x, 0.97), (x, 0.98), (x, 0.985)],
                mark,
            })
            .into();
        let axis = PlotAxis { scale: Scale::Fitted, ..TIME };
        let limits = [Limit::Y(0.99, "objective")];
        let drawing =
            Chart { x: axis, y: axis, series: &series, roof: &[], limits: &limits }.drawing().unwrap();
        for (svg, width) in [(&drawing.svg, WIDE.width), (&drawing.narrow, NARROW.width)] {
            assert_eq!((svg.matches(">chosen<").count(), svg.matches("h10 M").count()), (1, 2), "{svg}");
            assert!(svg.contains(">objective<"), "a fitted axis reaches its limit: {svg}");
            for (name, most) in [("cx", width), ("x1", width), ("y1", 1.5 * HEIGHT), ("x", width)] {
                for at in svg.split(&format!(" {name}=\"")).skip(1) {
                    let at: f64 = at.split('"').next().unwrap().parse().unwrap();
                    assert!((0.0..=most).contains(&at), "{name} {at}");
                }
            }
        }
        assert_eq!(drawing.rows.len(), 2);
        assert_eq!(drawing.rows[0][2], TableCell::number("0.98 (0.97 to 0.985)"));
    }

    #[test]
    fn nothing_to_draw_draws_nothing() {
        assert_eq!(chart(BYTES, RATE, &[], &[]), "");
        let bad = Series { name: "x".into(), points: vec![(0.0, -1.0)], mark: Mark::Dots };
        assert_eq!(chart(BYTES, RATE, &[bad], &[]), "");
    }
}
