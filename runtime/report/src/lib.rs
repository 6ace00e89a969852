//! Renders reports: HTML pages, SVG charts, numbers and bars in plain text, and files written atomically.
//!
//! [`html`] has the frame and the parts of a page, [`svg`] curves, [`bars`] horizontal bars; [`numbers`] and
//! [`text`] format values for people, and [`files`] writes what others read.
//!
//! Absent by design: devices, measurements, and the content of any single report.

#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![forbid(unsafe_code)]

pub mod bars;
pub mod files;
pub mod html;
pub mod numbers;
pub mod svg;
pub mod text;
