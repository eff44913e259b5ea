//! Flags that name workers, and the job flags that used to bound their registration.
//!
//! `--prefill` takes a URL and, as a separate word, an optional bootstrap port or `none`; clap is told "one or two
//! values" and the second is read here. Workers that are named here are registered as upserts with the source
//! `startup`; ones that are no longer named at the next start are removed.

use clap::{ArgMatches, Args, FromArgMatches, ValueEnum};

use super::error::CliError;

/// Role of a start-up worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leg {
    /// Serves whole requests.
    Regular,
    /// Computes the prompt's KV cache.
    Prefill,
    /// Generates the output.
    Decode,
}

/// Engine that start-up workers run when it should not be detected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "lower")]
pub enum BackendName {
    /// SGLang.
    Sglang,
    /// vLLM.
    Vllm,
    /// TokenSpeed: gRPC only. Absent.
    Tokenspeed,
    /// TensorRT-LLM: gRPC only. Absent.
    Trtllm,
    /// OpenAI as a provider. Absent.
    Openai,
    /// Anthropic as a provider. Absent.
    Anthropic,
}

impl BackendName {
    /// The name in flags and worker records.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sglang => "sglang",
            Self::Vllm => "vllm",
            Self::Tokenspeed => "tokenspeed",
            Self::Trtllm => "trtllm",
            Self::Openai => "openai",
            Self::Anthropic => "anthropic",
        }
    }
}

/// One worker named on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartupWorker {
    /// What it does.
    pub leg: Leg,
    /// Its address, scheme included.
    pub url: String,
    /// Port of a prefill worker's bootstrap server, when one was named.
    pub bootstrap_port: Option<u16>,
}

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
    #[arg(long, alias = "runtime", value_enum, hide_possible_values = true, value_name = "sglang|vllm")]
    backend: Option<BackendName>,
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
    /// Engine of the workers named here.
    pub backend: Option<BackendName>,
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

    pub(super) fn check(&self) -> Result<(), CliError> {
        match self.backend {
            None | Some(BackendName::Sglang | BackendName::Vllm) => Ok(()),
            Some(other) => {
                let reason =
                    format!("`{}` is not available in this version; available are sglang, vllm", other.as_str());
                Err(CliError::refused("--backend", reason))
            }
        }
    }

    /// Every worker to register, in the order regular, prefill, decode. A URL named twice is a conflict: a worker has
    /// one role.
    pub(super) fn workers(&self) -> Result<Vec<StartupWorker>, CliError> {
        let plain = |leg| move |url: &String| StartupWorker { leg, url: url.clone(), bootstrap_port: None };
        let mut workers: Vec<StartupWorker> = self.regular.iter().map(plain(Leg::Regular)).collect();
        if self.pd_disaggregation {
            workers.extend(self.prefills.iter().map(|(url, bootstrap_port)| StartupWorker {
                leg: Leg::Prefill,
                url: url.clone(),
                bootstrap_port: *bootstrap_port,
            }));
            workers.extend(self.decodes.iter().map(plain(Leg::Decode)));
        }
        for (index, worker) in workers.iter().enumerate() {
            if workers[..index].iter().any(|earlier| earlier.url == worker.url) {
                let flag = match worker.leg {
                    Leg::Regular => "--worker-urls",
                    Leg::Prefill => "--prefill",
                    Leg::Decode => "--decode",
                };
                return Err(CliError::conflict(flag, format!("{} is named twice", worker.url)));
            }
        }
        Ok(workers)
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

/// Checks that a worker's URL has a scheme of some wire and a host. Whether that wire is served is the business of the
/// registration, which can say more.
fn worker_url(text: &str) -> Result<String, String> {
    const SCHEMES: [&str; 5] = ["http://", "https://", "grpc://", "grpcs://", "ipc://"];
    let rest = SCHEMES.iter().find_map(|scheme| text.strip_prefix(scheme));
    match rest {
        Some(rest) if !rest.is_empty() && !text.contains(|c: char| c.is_whitespace() || c.is_control()) => {
            Ok(text.to_owned())
        }
        _ => Err("must be a URL that starts with http://, https://, grpc://, grpcs:// or ipc://".to_owned()),
    }
}
