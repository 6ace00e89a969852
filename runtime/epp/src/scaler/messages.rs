//! The messages of KEDA's `externalscaler.proto`.

#![allow(unreachable_pub, reason = "the generated service is public in its private module")]

use prost::Message;
use std::collections::HashMap;

/// The scaled object that a request is about.
#[derive(Clone, PartialEq, Message)]
pub struct ScaledObjectRef {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub namespace: String,
    #[prost(map = "string, string", tag = "3")]
    pub scaler_metadata: HashMap<String, String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct IsActiveResponse {
    #[prost(bool, tag = "1")]
    pub result: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct GetMetricSpecResponse {
    #[prost(message, repeated, tag = "1")]
    pub metric_specs: Vec<MetricSpec>,
}

#[derive(Clone, PartialEq, Message)]
pub struct MetricSpec {
    #[prost(string, tag = "1")]
    pub metric_name: String,
    #[prost(int64, tag = "2")]
    pub target_size: i64,
    #[prost(double, tag = "3")]
    pub target_size_float: f64,
}

#[derive(Clone, PartialEq, Message)]
pub struct GetMetricsRequest {
    #[prost(message, optional, tag = "1")]
    pub scaled_object_ref: Option<ScaledObjectRef>,
    #[prost(string, tag = "2")]
    pub metric_name: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct GetMetricsResponse {
    #[prost(message, repeated, tag = "1")]
    pub metric_values: Vec<MetricValue>,
}

#[derive(Clone, PartialEq, Message)]
pub struct MetricValue {
    #[prost(string, tag = "1")]
    pub metric_name: String,
    #[prost(int64, tag = "2")]
    pub metric_value: i64,
    #[prost(double, tag = "3")]
    pub metric_value_float: f64,
}
