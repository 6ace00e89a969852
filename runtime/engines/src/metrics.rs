//! Reads a few numbers from Prometheus' text format.

/// Samples of a document.
pub(crate) struct Exposition<'a>(&'a str);

impl<'a> Exposition<'a> {
    pub(crate) fn new(text: &'a str) -> Self {
        Exposition(text)
    }

    /// Labels and values of all samples of this name.
    fn samples(&self, name: &str) -> impl Iterator<Item = (&'a str, f64)> {
        self.0.lines().filter_map(move |line| {
            let rest = line.strip_prefix(name)?;
            let (labels, value) = match rest.strip_prefix('{') {
                Some(rest) => rest.rsplit_once('}')?,
                None if rest.starts_with([' ', '\t']) => ("", rest),
                None => return None,
            };
            Some((labels, value.split_whitespace().next()?.parse().ok()?))
        })
    }

    /// The sum over all label sets; none without a sample.
    pub(crate) fn sum(&self, name: &str) -> Option<f64> {
        self.samples(name).map(|(_, value)| value).reduce(|a, b| a + b)
    }

    /// The largest value of any label set.
    pub(crate) fn largest(&self, name: &str) -> Option<f64> {
        self.samples(name).map(|(_, value)| value).reduce(f64::max)
    }

    /// The sum over label sets of the products of these labels' numbers, of a sample that carries facts in
    /// its labels.
    pub(crate) fn label_products(&self, name: &str, factors: &[&str]) -> Option<f64> {
        let product =
            |labels: &str| factors.iter().map(|factor| label(labels, factor)?.parse::<f64>().ok()).product();
        let products: Option<Vec<f64>> = self.samples(name).map(|(labels, _)| product(labels)).collect();
        products.filter(|products| !products.is_empty()).map(|products| products.iter().sum())
    }

    /// A label of the first sample.
    pub(crate) fn label(&self, name: &str, of: &str) -> Option<&'a str> {
        label(self.samples(name).next()?.0, of)
    }
}

/// A label's value. Values with quotes in them are of no use here.
fn label<'a>(labels: &'a str, name: &str) -> Option<&'a str> {
    let at = labels.match_indices(name).map(|(at, _)| at).find(|&at| {
        let begins = at == 0 || labels[..at].ends_with([',', ' ']);
        begins && labels[at + name.len()..].starts_with("=\"")
    })?;
    labels[at + name.len() + 2..].split('"').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_summed_and_labels_read() {
        let text = "# HELP a b\n# TYPE vllm:num_requests_running gauge\n\
                    vllm:num_requests_running{engine=\"0\",model_name=\"m}\"} 3.0\n\
                    vllm:num_requests_running{engine=\"1\",model_name=\"m\"} 2 1700000000\n\
                    vllm:num_requests_running_more 9\n\
                    vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"100\",x_block_size=\"9\"} 1.0\n\
                    plain 7\nbroken{a=\"b\" 3\nnone x\n";
        let of = Exposition::new(text);
        assert_eq!(of.sum("vllm:num_requests_running"), Some(5.0));
        assert_eq!(of.largest("vllm:num_requests_running"), Some(3.0));
        assert_eq!(
            (of.sum("plain"), of.sum("broken"), of.sum("none"), of.sum("other")),
            (Some(7.0), None, None, None)
        );
        assert_eq!(
            of.label_products("vllm:cache_config_info", &["block_size", "num_gpu_blocks"]),
            Some(1600.0)
        );
        assert_eq!(of.label("vllm:cache_config_info", "block_size"), Some("16"));
        assert_eq!(of.label_products("vllm:cache_config_info", &["block_size", "absent"]), None);
    }
}
