"""Typed errors for everything that a user can cause.

Each class says what it is in general (``title``, ``symptom``, ``check``, ``advice``: `docs/troubleshooting.md` is made
from these), each instance what happened here: ``cause`` (one sentence), ``evidence`` (the values that show it) and
``remedy`` (what to do now). An error crosses the process border as a dict and comes back as the same class. What HTTP
status or exit code it becomes is decided once, at the edge, not here.
"""

from __future__ import annotations

from typing import Any, ClassVar


class GainzError(Exception):
    """Root of all errors that are somebody's to mend. ``code`` is stable and public."""

    code: ClassVar[str] = "error"
    title: ClassVar[str] = "Something went wrong"
    symptom: ClassVar[str] = ""
    check: ClassVar[str] = ""
    advice: ClassVar[str] = ""
    registry: ClassVar[dict[str, type[GainzError]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.code in GainzError.registry:
            raise TypeError(f"two errors share the code {cls.code!r}")
        GainzError.registry[cls.code] = cls

    def __init__(self, cause: str, *, remedy: str | None = None, field: str | None = None, **evidence: Any) -> None:
        self.cause = cause
        self.remedy = self.advice if remedy is None else remedy
        self.field = field
        self.evidence = evidence
        super().__init__(cause)

    def __str__(self) -> str:
        facts = ", ".join(f"{key}={value}" for key, value in self.evidence.items())
        return " ".join(part for part in (self.cause, f"({facts})" if facts else "", self.remedy) if part)

    def to_dict(self) -> dict[str, Any]:
        return {"code": self.code, "cause": self.cause, "remedy": self.remedy, "field": self.field,
                "evidence": {key: str(value) for key, value in self.evidence.items()}}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> GainzError:
        cls = GainzError.registry.get(data["code"], GainzError)
        return cls(data["cause"], remedy=data["remedy"], field=data["field"], **data["evidence"])

    def __reduce__(self):
        return GainzError.from_dict, (self.to_dict(),)


class InvalidRequest(GainzError):
    code = "invalid_request"
    title = "A value cannot be honoured"
    symptom = "HTTP 400, or a red message under the form, naming one field."
    check = "Compare the named field with the range in the message."
    advice = "Correct what is named, then try again."


class ContextTooLong(InvalidRequest):
    code = "context_too_long"
    title = "Prompt and answer do not fit the context"
    symptom = "HTTP 400 naming the prompt's tokens and the context length."
    check = "Read the prompt's token count in the message."
    advice = "Shorten the prompt, ask for fewer tokens, or load the model with a larger context."


class NoChatTemplate(InvalidRequest):
    code = "no_chat_template"
    title = "The model has no chat template"
    symptom = "HTTP 400 on a chat; plain completion works."
    check = "Look for chat_template in tokenizer_config.json, chat_template.jinja or the GGUF's metadata."
    advice = "Use plain completion, or put a chat_template.jinja file beside the weights and load the model again."


class ModelNotFound(GainzError):
    code = "model_not_found"
    title = "There is no such model"
    symptom = "HTTP 404 naming the model asked for and those there are."
    check = "`python app.py models` lists the names."
    advice = "Use one of the listed names, or put the model's folder under models/."


class ModelNotLoaded(GainzError):
    code = "model_not_loaded"
    title = "The model is not loaded"
    symptom = "HTTP 409: the name is known, nothing of it is in memory."
    check = "The header of the page and /health show what is loaded."
    advice = "Load it on the Models tab, or start with --load NAME (or --load-on-demand, to have what is asked for loaded)."


class LoadError(GainzError):
    code = "load_failed"
    title = "A model could not be loaded"
    symptom = "The load stops with a message; other models go on."
    check = "The message names the file or tensor."
    advice = "Fetch the model again, or pick another file."


class UnknownFormat(LoadError):
    code = "unknown_format"
    title = "No backend reads this folder or file"
    symptom = "The Models tab shows the entry with the reason it cannot be loaded."
    check = "A model is one .gguf file, or a folder with config.json and *.safetensors."
    advice = "Check that the download is complete and that the format is one of FP16, GPTQ, AWQ or GGUF."


class BrokenFile(LoadError):
    code = "broken_file"
    title = "A model file is cut or damaged"
    symptom = "The load ends at once, naming the file and what is wrong in it."
    check = "Compare the file's size with that of its source; `python app.py verify NAME` compares checksums."
    advice = "Fetch the file again."


class UnsupportedTensor(LoadError):
    code = "unsupported_tensor"
    title = "A tensor's type, shape or layout is not supported"
    symptom = "The load ends, naming the tensor and the reason."
    check = "The message gives the tensor's name, type and shape."
    advice = "Use another quantization of the same model."


class UnsafeFile(LoadError):
    code = "unsafe_file"
    title = "The checkpoint is a pickle, which can run code when opened"
    symptom = "A folder with only pytorch_model.bin is refused."
    check = "Look for *.safetensors in the folder."
    advice = "Convert it to safetensors in an environment that you trust (transformers: model.save_pretrained)."


class ConfigConflict(LoadError):
    code = "config_conflict"
    title = "Two files of the model contradict each other"
    symptom = "The load ends, showing both values and both files."
    check = "Open both files at the named keys."
    advice = "Correct the wrong file, or fetch the model again."


class DraftParent(LoadError):
    code = "draft_parent"
    title = "The model that this draft borrows from is missing or has changed"
    symptom = "A draft cannot be loaded: embeddings and head are its parent's, and it names the parent."
    check = "The message names the parent; it must lie beside the draft, as it was when the draft was made."
    advice = "Put the parent back under its name, or make the draft again from the model as it is now."


class OutOfMemory(GainzError):
    code = "out_of_memory"
    title = "Not enough memory"
    symptom = "A load is refused before it starts, or a request ends with this error; the process lives on."
    check = "The message shows bytes needed and bytes free."
    advice = "Unload a model, choose a smaller context, int8 KV or a smaller quantization."


class MissingRequirement(GainzError):
    code = "missing_requirement"
    title = "A backend or kernel needs something that is not installed"
    symptom = "It is listed as “unavailable: needs X”."
    check = "`python app.py doctor` lists every backend with its reason."
    advice = "Install the named package, or use another backend."


class QueueFull(GainzError):
    code = "queue_full"
    title = "Too many requests are waiting"
    symptom = "HTTP 429 with the length of the queue."
    check = "The header of the page and /metrics show the queue."
    advice = "Try again in a moment, or raise the queue limit."


class EngineDied(GainzError):
    code = "engine_died"
    title = "The engine process ended while it worked"
    symptom = "The running answers end with this error; the page stays up; the next request starts the engine anew."
    check = "logs/ holds the exit code; code -9 usually means that the system ran out of memory."
    advice = "Ask again: the engine comes back with the models it had. If it happens again, choose a smaller context."


class EngineStopping(GainzError):
    code = "engine_stopping"
    title = "The server is shutting down"
    symptom = "HTTP 503 while the process drains."
    check = "The terminal shows the shutdown."
    advice = "Start the server again."


class StepFailed(GainzError):
    code = "step_failed"
    title = "The computation of this request failed"
    symptom = "One answer ends with this error; others and later ones are unaffected."
    check = "The log line of this request names the exception."
    advice = "Ask again; if it repeats, report it with the diagnostics."


class Cancelled(GainzError):
    code = "cancelled"
    title = "The work was cancelled"
    symptom = "A load or job ends when somebody pressed Cancel."
    check = ""
    advice = "Start it again if that was not intended."


class JobDied(GainzError):
    code = "job_died"
    title = "A job's process ended without a result"
    symptom = "Making a variant or measuring quality stops with this error; page and engine go on."
    check = "The message gives the exit code and the last words; -9 usually means that the system ran out of memory."
    advice = "Unload models and start it again: a variant goes on where it stopped. If it repeats, report the last words in logs/."


class NotSupported(GainzError):
    code = "not_supported"
    title = "This model or backend cannot do that"
    symptom = "HTTP 400, or a note on the page, with the reason."
    check = "The model's card on the Models tab lists what it can do."
    advice = "Choose another model or backend for this."


class NotMeasurable(GainzError):
    code = "not_measurable"
    title = "A benchmark cannot be taken this way"
    symptom = "The benchmark ends with the reason; what was measured until then is kept."
    check = "Whether both sides give exactly as many tokens as asked for, and whether a cache answered for one of them."
    advice = "Change what the message names, or measure in warm mode."


class BadSetting(GainzError):
    code = "bad_setting"
    title = "A setting is unknown or out of range"
    symptom = "The program ends at start with exit code 2, naming the key and where it came from."
    check = "`python app.py --help` lists every setting."
    advice = "Correct or remove the named key."


class PortTaken(GainzError):
    code = "port_taken"
    title = "The port is in use"
    symptom = "The program ends at start, naming the port."
    check = "Another Gainz, or another program, listens there."
    advice = "Stop the other program, or start with --port and another number."


class DiskFull(GainzError):
    code = "disk_full"
    title = "Not enough room on the disk"
    symptom = "A fetch or a job is refused before it starts, with bytes needed and bytes free."
    check = "`python app.py doctor` shows the free space."
    advice = "Free some room, or choose another folder with --models."


class FetchFailed(GainzError):
    code = "fetch_failed"
    title = "A file could not be fetched"
    symptom = "The starter model or a pull stops; what was complete stays."
    check = "Is this machine online? Is a proxy needed?"
    advice = "Try again: the fetch goes on where it stopped. Offline, put a model under models/ by hand."


class ChecksumMismatch(FetchFailed):
    code = "checksum_mismatch"
    title = "A fetched file is not the one expected"
    symptom = "The file is refused and removed; both checksums are shown."
    check = "A proxy that rewrites downloads, or a damaged transfer."
    advice = "Fetch it again; if it repeats, do not use this source."


class NameRefused(GainzError):
    code = "name_refused"
    title = "A name that would leave its folder, or is no name"
    symptom = "HTTP 400 naming the name."
    check = "Names are letters, digits, dot, dash and underscore."
    advice = "Choose a plain name."


class NameTaken(NameRefused):
    code = "name_taken"
    title = "There is a model of that name already"
    symptom = "An import, a pull or a variant is refused; nothing is overwritten."
    check = "`python app.py models` lists the names."
    advice = "Choose another name, or remove the old one first."


class AddressRefused(InvalidRequest):
    code = "address_refused"
    title = "This address may not be reached from here"
    symptom = "A server cannot be added, or its model neither loads nor answers; nothing was sent to it."
    check = "What the name resolves to, and `remote_hosts` and `remote_private` in the settings."
    advice = "Whoever runs this server can allow the address: --remote-hosts HOST:PORT, or remote_hosts in gainz.toml."


class RemoteUnreachable(GainzError):
    code = "remote_unreachable"
    title = "The other server cannot be reached"
    symptom = "A model that another server answers does not load or answer; others go on."
    check = "`curl ADDRESS/models` on the machine that runs Gainz. Proxies of the environment are not used."
    advice = "Start that server, or correct the address in models/NAME/manifest.json."


class RemoteRefused(InvalidRequest):
    code = "remote_refused"
    title = "The other server refuses this request"
    symptom = "HTTP 400 with the other server's own words."
    check = "The message quotes that server: it names the field, the length or the model that it does not take."
    advice = "Change what it names; what cannot be sent to it at all, its card on the Models tab says."


class RemoteFailed(GainzError):
    code = "remote_failed"
    title = "The other server failed"
    symptom = "An answer ends in the middle, or the other server answers with an error or with what is no answer."
    check = "That server's own log at the time of the request."
    advice = "Ask again; if it repeats, look into that server's log."


class RegistryError(GainzError):
    code = "registry_error"
    title = "Two backends contradict each other"
    symptom = "The program ends at start, naming both."
    check = "Files in backends/ that define BACKEND."
    advice = "Rename or remove one of the two."
