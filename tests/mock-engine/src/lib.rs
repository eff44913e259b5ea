//! Mock SGLang and vLLM engines that enforce the engines' protocol rules.
