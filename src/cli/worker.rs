//! Flags that name workers, and the job flags that used to bound their registration.
//!
//! `--prefill` takes a URL and, as a separate word, an optional bootstrap port or `none`; clap is told "one or two
//! values" and the second is read here. Workers that are named here are registered as upserts with the source
//! `startup`; ones that are no longer named at the next start are removed.

use clap::{ArgMatches, Args, FromArgMatches};
use smg_fleet::{Runtime, Secret, WorkerSpec, WorkerType, WorkerUrl};

use super::error::CliError;

/// Engines of the documented `--backend`, in the order of its help. Two of them speak HTTP with prefill and decode.
const BACKENDS: [&str; 6] = ["sglang", "vllm", "tokenspeed", "trtllm", "openai", "anthropic"];

/// Plain worker flags.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Workers")]
struct PlainWorkerFlags {
    /// Regular workers, each serving whole requests
    #[arg(long, num_args = 0.., value_name = "URL", value_parser = worker_url)]
    worker_urls: Vec<String>,
    /// Serve with separate prefill and decode workers
    #[arg(long)]
    pd_disaggregation: bool,
    /// Decode worker; repeat for each
    #[arg(long, value_name = "URL", value_parser = worker_url)]
    decode: Vec<String>,
    /// Engine of the workers named here [default: detected]
    #[arg(long, alias = "runtime", value_parser = BACKENDS, hide_possible_values = true, value_name = "sglang|vllm")]
    backend: Option<String>,
    /// Key of the workers named here, sent to them as `Authorization: Bearer`
    #[arg(long, value_name = "KEY")]
    worker_api_key: Option<Secret>,
    /// Accepted for compatibility: registrations are bounded by the control plane [default: 1000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    job_queue_capacity: Option<u32>,
    /// Accepted for compatibility: registrations are bounded by the control plane [default: 200]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    job_queue_concurrency: Option<u32>,
}

/// Flags that name workers.
#[derive(Debug, Clone)]
pub struct WorkerFlags {
    /// True when prefill and decode workers were asked for.
    pub pd_disaggregation: bool,
    backend: Option<String>,
    api_key: Option<Secret>,
    regular: Vec<String>,
    prefills: Vec<(String, Option<u16>)>,
    decodes: Vec<String>,
}

impl WorkerFlags {
    /// Number of prefill and of decode workers named, when they are used at all.
    pub(super) fn legs(&self) -> Option<(usize, usize)> {
        self.pd_disaggregation.then_some((self.prefills.len(), self.decodes.len()))
    }

    /// The per-leg flags that were given, for messages.
    pub(super) fn leg_flags(&self) -> Vec<&'static str> {
        let given = [("--prefill", !self.prefills.is_empty()), ("--decode", !self.decodes.is_empty())];
        given.into_iter().filter_map(|(flag, given)| given.then_some(flag)).collect()
    }

    /// Every worker to register, in the order regular, prefill, decode.
    ///
    /// A URL named twice is a conflict: a worker has one role.
    pub(super) fn specs(&self) -> Result<Vec<WorkerSpec>, CliError> {
        let runtime = self.runtime()?;
        let regular = self.regular.iter().map(|url| (WorkerType::Regular, url, None));
        let prefills = self.prefills.iter().map(|(url, port)| (WorkerType::Prefill, url, *port));
        let decodes = self.decodes.iter().map(|url| (WorkerType::Decode, url, None));
        let legs = prefills.chain(decodes).filter(|_| self.pd_disaggregation);
        let mut specs: Vec<WorkerSpec> = Vec::new();
        for (worker_type, url, bootstrap_port) in regular.chain(legs) {
            if specs.iter().any(|earlier| earlier.url == *url) {
                let flag = match worker_type {
                    WorkerType::Prefill => "--prefill",
                    WorkerType::Decode => "--decode",
                    WorkerType::Regular | WorkerType::Encode => "--worker-urls",
                };
                return Err(CliError::conflict(flag, format!("{url} is named twice")));
            }
            let api_key = self.api_key.clone();
            specs.push(WorkerSpec { runtime, bootstrap_port, api_key, ..WorkerSpec::new(url, worker_type) });
        }
        Ok(specs)
    }

    fn runtime(&self) -> Result<Runtime, CliError> {
        match self.backend.as_deref() {
            None => Ok(Runtime::Unspecified),
            Some("sglang") => Ok(Runtime::Sglang),
            Some("vllm") => Ok(Runtime::Vllm),
            Some(other) => {
                let reason = format!("`{other}` is not available in this version; available are sglang, vllm");
                Err(CliError::refused("--backend", reason))
            }
        }
    }
}

impl Args for WorkerFlags {
    fn augment_args(command: clap::Command) -> clap::Command {
        PlainWorkerFlags::augment_args(command).arg(
            clap::Arg::new("prefill")
                .long("prefill")
                .help("Prefill worker with its bootstrap port, if it has one; repeat for each")
                .help_heading("Workers")
                .value_names(["URL", "PORT|none"])
                .num_args(1..=2)
                .action(clap::ArgAction::Append),
        )
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for WorkerFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let plain = PlainWorkerFlags::from_arg_matches(matches)?;
        let occurrences = matches.get_occurrences::<String>("prefill");
        let prefills = occurrences.into_iter().flatten().map(prefill_address).collect::<Result<_, _>>()?;
        Ok(Self {
            pd_disaggregation: plain.pd_disaggregation,
            backend: plain.backend,
            api_key: plain.worker_api_key,
            regular: plain.worker_urls,
            prefills,
            decodes: plain.decode,
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Reads the one or two words of one `--prefill`.
fn prefill_address<'a>(mut words: impl Iterator<Item = &'a String>) -> Result<(String, Option<u16>), clap::Error> {
    let invalid = |value: &str, rule: &str| {
        let message = format!("invalid value '{value}' for '--prefill <URL> [PORT|none]': {rule}\n");
        clap::Error::raw(clap::error::ErrorKind::ValueValidation, message)
    };
    let url = words.next().map_or("", String::as_str);
    let url = worker_url(url).map_err(|rule| invalid(url, &rule))?;
    let port = match words.next() {
        None => None,
        Some(word) if word.eq_ignore_ascii_case("none") => None,
        Some(word) => match word.parse::<u16>() {
            Ok(port) if port != 0 => Some(port),
            _ => return Err(invalid(word, "the bootstrap port is 1 to 65535, or `none`")),
        },
    };
    Ok((url, port))
}

/// A worker's normalised URL. Whether its wire is served is the business of the registration, which can say more.
fn worker_url(text: &str) -> Result<String, String> {
    WorkerUrl::parse(text).map(|url| url.to_string()).map_err(|error| error.to_string())
}
