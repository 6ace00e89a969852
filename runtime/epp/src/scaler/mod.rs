//! An external scaler of KEDA: wanted replicas of a planned fleet's pools, by the load of the last minutes.
//!
//! The decisions are those of [`PoolScaler`]. A `ScaledObject` names its pool in the metadata of its trigger
//! (`pool: NAME`); the metric is the pool's replicas, with a target of one a replica.

pub(crate) mod messages;

mod service {
    #![allow(missing_docs, unreachable_pub, dead_code, clippy::all, clippy::too_many_lines)]
    include!(concat!(env!("OUT_DIR"), "/externalscaler.ExternalScaler.rs"));
}

use futures_util::Stream;
use messages::{
    GetMetricSpecResponse, GetMetricsRequest, GetMetricsResponse, IsActiveResponse, MetricSpec, MetricValue,
    ScaledObjectRef,
};
use mixfleet_hal::units::Seconds;
use mixfleet_runtime::env::SharedEnv;
use mixfleet_runtime::metrics::Metrics;
use mixfleet_scheduler::scale::{PoolScaler, ScaleLoad, ScalePlan};
use service::external_scaler_server::{ExternalScaler, ExternalScalerServer};
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::net::TcpListener;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

/// Time between two decisions.
const STEP_EVERY: Duration = Duration::from_secs(5);
/// The metric that autoscalers ask for.
const METRIC: &str = "mixfleet-replicas";
/// Maximum ratio of wanted to computed prompt tokens by which tokens of answers are raised: those of refused
/// requests are not known.
const REFUSED_TIMES: f64 = 10.0;

/// Tokens since the start, as metrics count them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct TokenCounts {
    /// Of the prompts of all requests, refused ones too.
    pub(crate) wanted: f64,
    /// Of prompts that were computed.
    pub(crate) prompts: f64,
    pub(crate) answers: f64,
}

impl TokenCounts {
    /// Reads them from the metrics' text.
    fn of(metrics: &Metrics) -> Self {
        let text = metrics.encode();
        let sum = |name: &str| -> f64 {
            let lines = text.lines().filter(|line| line.starts_with(name));
            let values = lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
            values.sum()
        };
        TokenCounts {
            wanted: sum("mixfleet_pick_prompt_tokens_total"),
            prompts: sum("mixfleet_prompt_tokens_total"),
            answers: sum("mixfleet_generation_tokens_total"),
        }
    }
}

/// Counts over time.
#[derive(Debug, Default)]
pub(crate) struct LoadWindow {
    counts: VecDeque<(Seconds, TokenCounts)>,
}

impl LoadWindow {
    /// Adds counts, and returns the load of the last `window_s` seconds.
    pub(crate) fn push(&mut self, now: Seconds, counts: TokenCounts, window_s: f64) -> ScaleLoad {
        self.counts.push_back((now, counts));
        // the oldest one kept is the last that is as old as the window, or older
        while self.counts.get(1).is_some_and(|(at, _)| (now - *at).0 >= window_s) {
            self.counts.pop_front();
        }
        let (since, first) = self.counts[0];
        let span_s = (now - since).0;
        if span_s <= 0.0 {
            return ScaleLoad::default();
        }
        let rate = |now: f64, before: f64| (now - before).max(0.0) / span_s;
        let wanted = rate(counts.wanted, first.wanted);
        let (prompts, answers) = (rate(counts.prompts, first.prompts), rate(counts.answers, first.answers));
        let refused = if prompts > 0.0 { (wanted / prompts).clamp(1.0, REFUSED_TIMES) } else { 1.0 };
        ScaleLoad { prompt_tokens_per_s: wanted.max(prompts), answer_tokens_per_s: answers * refused }
    }
}

/// The scaler of a plan's pools; clones share their state.
#[derive(Clone)]
pub struct FleetScaler(Arc<Mutex<PoolScaler>>);

impl FleetScaler {
    /// Reads a plan, YAML or JSON.
    ///
    /// # Errors
    /// The fault of the plan.
    pub fn read(text: &str) -> Result<Self, String> {
        let plan: ScalePlan = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
        Ok(FleetScaler(Arc::new(Mutex::new(PoolScaler::new(plan)?))))
    }

    fn lock(&self) -> MutexGuard<'_, PoolScaler> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decides at `now`, for a load.
    pub fn step(&self, now: Seconds, load: ScaleLoad) {
        let mut scaler = self.lock();
        let before = scaler.replicas();
        scaler.step(now, load);
        let after = scaler.replicas();
        for (pool, (old, new)) in scaler.plan().pools.iter().zip(before.iter().zip(&after)) {
            if old != new {
                let ScaleLoad { prompt_tokens_per_s, answer_tokens_per_s } = load;
                let pool = &pool.name;
                tracing::info!(pool, old, new, prompt_tokens_per_s, answer_tokens_per_s, "a pool is scaled");
            }
        }
    }

    /// Follows the load that metrics show, forever.
    pub async fn follow(self, env: SharedEnv, metrics: Metrics) {
        let mut window = LoadWindow::default();
        let window_s = self.lock().plan().window_s;
        loop {
            let now = env.now();
            let load = window.push(now, TokenCounts::of(&metrics), window_s);
            self.step(now, load);
            tokio::time::sleep(STEP_EVERY).await;
        }
    }

    /// Serves autoscalers.
    ///
    /// # Errors
    /// The reason why it cannot serve.
    pub async fn serve(self, listener: TcpListener) -> Result<(), tonic::transport::Error> {
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        Server::builder().add_service(ExternalScalerServer::new(self)).serve_with_incoming(incoming).await
    }

    /// Wanted replicas of the pool that a scaled object names.
    fn wanted(&self, of: &ScaledObjectRef) -> Result<u32, Status> {
        let Some(pool) = of.scaler_metadata.get("pool") else {
            return Err(Status::invalid_argument("the trigger's metadata need 'pool'"));
        };
        let scaler = self.lock();
        let at = scaler.plan().pools.iter().position(|one| one.name == *pool);
        let at = at.ok_or_else(|| {
            let known: Vec<&str> = scaler.plan().pools.iter().map(|one| one.name.as_str()).collect();
            Status::not_found(format!("no pool '{pool}'; known: {}", known.join(", ")))
        })?;
        Ok(scaler.replicas()[at])
    }
}

#[tonic::async_trait]
impl ExternalScaler for FleetScaler {
    type StreamIsActiveStream = Pin<Box<dyn Stream<Item = Result<IsActiveResponse, Status>> + Send>>;

    async fn is_active(
        &self,
        request: Request<ScaledObjectRef>,
    ) -> Result<Response<IsActiveResponse>, Status> {
        let result = self.wanted(request.get_ref())? > 0;
        Ok(Response::new(IsActiveResponse { result }))
    }

    async fn stream_is_active(
        &self,
        request: Request<ScaledObjectRef>,
    ) -> Result<Response<Self::StreamIsActiveStream>, Status> {
        let of = request.into_inner();
        self.wanted(&of)?;
        let told = (self.clone(), of, None);
        let changes = futures_util::stream::unfold(told, async |(scaler, of, mut told)| {
            loop {
                let now = scaler.wanted(&of).map(|wanted| wanted > 0);
                match now {
                    Ok(result) if told != Some(result) => {
                        told = Some(result);
                        return Some((Ok(IsActiveResponse { result }), (scaler, of, told)));
                    }
                    Ok(_) => tokio::time::sleep(STEP_EVERY).await,
                    Err(status) => return Some((Err(status), (scaler, of, told))),
                }
            }
        });
        Ok(Response::new(Box::pin(changes)))
    }

    async fn get_metric_spec(
        &self,
        request: Request<ScaledObjectRef>,
    ) -> Result<Response<GetMetricSpecResponse>, Status> {
        self.wanted(request.get_ref())?;
        let spec = MetricSpec { metric_name: METRIC.into(), target_size: 1, target_size_float: 1.0 };
        Ok(Response::new(GetMetricSpecResponse { metric_specs: vec![spec] }))
    }

    async fn get_metrics(
        &self,
        request: Request<GetMetricsRequest>,
    ) -> Result<Response<GetMetricsResponse>, Status> {
        let GetMetricsRequest { scaled_object_ref, metric_name } = request.into_inner();
        let of = scaled_object_ref.ok_or_else(|| Status::invalid_argument("no scaled object"))?;
        let wanted = self.wanted(&of)?;
        let value =
            MetricValue { metric_name, metric_value: wanted.into(), metric_value_float: wanted.into() };
        Ok(Response::new(GetMetricsResponse { metric_values: vec![value] }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_load_is_that_of_the_window_and_counts_the_refused() {
        let mut window = LoadWindow::default();
        let counts = |wanted: f64, prompts: f64, answers: f64| TokenCounts { wanted, prompts, answers };
        assert_eq!(window.push(Seconds(0.0), counts(0.0, 0.0, 0.0), 60.0), ScaleLoad::default());
        for second in (10..=120).step_by(10) {
            let at = f64::from(second);
            window.push(Seconds(at), counts(at * 100.0, at * 50.0, at * 5.0), 60.0);
        }
        // half of the requests are refused: twice the answers are wanted
        let load = window.push(Seconds(130.0), counts(13_000.0, 6500.0, 650.0), 60.0);
        assert_eq!(load, ScaleLoad { prompt_tokens_per_s: 100.0, answer_tokens_per_s: 10.0 });
        for second in (140..=200).step_by(10) {
            window.push(Seconds(f64::from(second)), counts(13_000.0, 6500.0, 650.0), 60.0);
        }
        let load = window.push(Seconds(210.0), counts(13_000.0, 6500.0, 650.0), 60.0);
        assert_eq!(load, ScaleLoad::default());
    }

    #[tokio::test]
    async fn an_autoscaler_gets_the_replicas_of_its_pool() {
        let text = "
budgetUsdPerHour: 20
promptTokensPerS: 1000
answerTokensPerS: 100
pools:
  - {name: prefill, replicas: 1, min: 0, max: 4, usdPerHour: 2.5, answers: false}
  - {name: decode, replicas: 2, max: 8, usdPerHour: 0.7, prompts: false}
";
        let scaler = FleetScaler::read(text).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(scaler.clone().serve(listener));
        let mut client = service::external_scaler_client::ExternalScalerClient::connect(url).await.unwrap();
        let of = |pool: &str| ScaledObjectRef {
            scaler_metadata: [("pool".to_owned(), pool.to_owned())].into(),
            ..ScaledObjectRef::default()
        };
        let spec = client.get_metric_spec(of("decode")).await.unwrap().into_inner().metric_specs;
        assert_eq!((spec[0].target_size, spec.len()), (1, 1));
        let metric_name = spec[0].metric_name.clone();
        let mut replicas = async |pool: &str| {
            let scaled_object_ref = Some(of(pool));
            let asked = GetMetricsRequest { scaled_object_ref, metric_name: metric_name.clone() };
            let values = client.get_metrics(asked).await.unwrap().into_inner().metric_values;
            (values[0].metric_value, values[0].metric_name == metric_name)
        };
        assert_eq!((replicas("prefill").await, replicas("decode").await), ((0, true), (1, true)));
        scaler.step(Seconds(1.0), ScaleLoad { prompt_tokens_per_s: 2000.0, answer_tokens_per_s: 200.0 });
        assert_eq!((replicas("prefill").await, replicas("decode").await), ((2, true), (4, true)));
        assert!(client.is_active(of("prefill")).await.unwrap().into_inner().result);
        let mut states = client.stream_is_active(of("prefill")).await.unwrap().into_inner();
        assert_eq!(states.message().await.unwrap(), Some(IsActiveResponse { result: true }));
        let unknown = client.get_metric_spec(of("other")).await.unwrap_err();
        assert!(unknown.message().contains("known: prefill, decode"), "{unknown}");
        let unnamed = client.is_active(ScaledObjectRef::default()).await.unwrap_err();
        assert_eq!(unnamed.code(), tonic::Code::InvalidArgument);
    }
}
