//! Generates the service of KEDA's external scalers. Its messages are in `src/scaler/messages.rs`, so that no
//! build needs `protoc`.

use tonic_build::manual::{Builder, Method, Service};

fn main() {
    let method = |name: &str, route: &str, input: &str, output: &str| {
        Method::builder()
            .name(name)
            .route_name(route)
            .input_type(format!("crate::scaler::messages::{input}"))
            .output_type(format!("crate::scaler::messages::{output}"))
            .codec_path("tonic_prost::ProstCodec")
    };
    let service = Service::builder()
        .name("ExternalScaler")
        .package("externalscaler")
        .method(method("is_active", "IsActive", "ScaledObjectRef", "IsActiveResponse").build())
        .method(
            method("stream_is_active", "StreamIsActive", "ScaledObjectRef", "IsActiveResponse")
                .server_streaming()
                .build(),
        )
        .method(
            method("get_metric_spec", "GetMetricSpec", "ScaledObjectRef", "GetMetricSpecResponse").build(),
        )
        .method(method("get_metrics", "GetMetrics", "GetMetricsRequest", "GetMetricsResponse").build())
        .build();
    Builder::new().compile(&[service]);
    println!("cargo:rerun-if-changed=build.rs");
}
